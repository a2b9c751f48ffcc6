// CUDA's driver, found at run time. Absent is an answer: no header and no library is needed to
// build or import, and the only file that names CUDA is cuda_driver.cpp.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace penstock {

class CudaError : public std::runtime_error {
 public:
  CudaError(int code, const std::string& what) : std::runtime_error{what}, code{code} {}
  const int code;
};

// Makes host memory reachable by the GPU's copy engines.
struct Registrar {
  virtual ~Registrar() = default;
  virtual void add(void* at, std::size_t bytes) = 0;  // throws CudaError
  // Waits for copies that still use the range, then lets it go.
  virtual void remove(void* at) noexcept = 0;
};

struct Cuda {
  int num_devices = 0;
  std::string why_none;  // why there is no device, for doctor; empty when there is one
};

// Looks once; later calls give the same answer. Creates no context.
const Cuda& find_cuda();

// Throws CudaError where find_cuda() has no device.
Registrar& cuda_registrar();

}  // namespace penstock
