#pragma once

#include <nanobind/nanobind.h>

// Adds the storage engines to the module that bind.cpp creates.
void bind_store(nanobind::module_& m);
