#pragma once

#include <nanobind/nanobind.h>

// The storage engines, added to the module that bind.cpp makes.
void bind_store(nanobind::module_& m);
