// CUDA's driver, loaded at run time. Its absence is a valid result: building and importing need no
// CUDA header or library. Only cuda_driver.cpp uses CUDA.
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

// Registers host memory, so that the GPU's copy engines can access it directly.
struct Registrar {
  virtual ~Registrar() = default;
  virtual void add(void* at, std::size_t bytes) = 0;  // throws CudaError
  // Waits for copies that still use the range, then unregisters it.
  virtual void remove(void* at) noexcept = 0;
};

struct Cuda {
  int num_devices = 0;
  std::string why_none;  // why there is no device, for penstock doctor; empty if there is one
};

// Searches once; later calls return the same result. Creates no context.
const Cuda& find_cuda();

// Throws CudaError if find_cuda() found no device.
Registrar& cuda_registrar();

}  // namespace penstock
