#include "cuda_driver.h"

#include <dlfcn.h>

#include <mutex>

namespace penstock {
namespace {

// The few driver functions used here, declared by hand. Their ABI has been stable since CUDA 11.
using Result = int;
using Device = int;
using Context = struct CudaContext*;
constexpr Result kSuccess = 0;
constexpr Result kNoDevice = 100;
constexpr unsigned kPortable = 1;  // visible to every context of the process

struct Driver {
  Result (*init)(unsigned) = nullptr;
  Result (*device_count)(int*) = nullptr;
  Result (*error_name)(Result, const char**) = nullptr;
  Result (*context_current)(Context*) = nullptr;
  Result (*context_push)(Context) = nullptr;
  Result (*context_pop)(Context*) = nullptr;
  Result (*context_synchronize)() = nullptr;
  Result (*primary_retain)(Context*, Device) = nullptr;
  Result (*primary_release)(Device) = nullptr;
  Result (*primary_state)(Device, unsigned*, int*) = nullptr;
  Result (*host_register)(void*, std::size_t, unsigned) = nullptr;
  Result (*host_unregister)(void*) = nullptr;
  Cuda found;
};

template <typename Function>
bool load(void* library, const char* name, Function& into) {
  into = reinterpret_cast<Function>(::dlsym(library, name));
  return into != nullptr;
}

bool load_all(void* library, Driver& d) {
  return load(library, "cuInit", d.init) && load(library, "cuDeviceGetCount", d.device_count) &&
         load(library, "cuGetErrorName", d.error_name) &&
         load(library, "cuCtxGetCurrent", d.context_current) &&
         load(library, "cuCtxPushCurrent_v2", d.context_push) &&
         load(library, "cuCtxPopCurrent_v2", d.context_pop) &&
         load(library, "cuCtxSynchronize", d.context_synchronize) &&
         load(library, "cuDevicePrimaryCtxRetain", d.primary_retain) &&
         load(library, "cuDevicePrimaryCtxRelease_v2", d.primary_release) &&
         load(library, "cuDevicePrimaryCtxGetState", d.primary_state) &&
         load(library, "cuMemHostRegister_v2", d.host_register) &&
         load(library, "cuMemHostUnregister", d.host_unregister);
}

std::string name_of(const Driver& d, Result code) {
  const char* name = nullptr;
  if (d.error_name != nullptr) d.error_name(code, &name);
  return name != nullptr ? name : "CUDA error " + std::to_string(code);
}

Driver look() {
  Driver d;
  // Never closed: the driver has threads that run until the process exits.
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    d.found.why_none = "no CUDA driver (libcuda.so.1 not found)";
  } else if (!load_all(library, d)) {
    d.found.why_none = "the CUDA driver is too old (11.0 or newer is needed)";
  } else if (const Result code = d.init(0); code != kSuccess) {
    d.found.why_none = code == kNoDevice ? "the CUDA driver sees no device" : name_of(d, code);
  } else if (d.device_count(&d.found.num_devices) != kSuccess || d.found.num_devices == 0) {
    d.found.num_devices = 0;
    d.found.why_none = "the CUDA driver sees no device";
  }
  return d;
}

const Driver& driver() {
  static const Driver found = look();
  return found;
}

// Makes a context current for a scope: the caller's if there is one, otherwise device 0's primary
// context, which torch uses too.
class WithContext {
 public:
  explicit WithContext(const Driver& d) : d_{d} {
    Context current = nullptr;
    d_.context_current(&current);
    if (current != nullptr) return;
    static std::once_flag retained;
    static Context primary = nullptr;
    static Result code = kSuccess;
    std::call_once(retained, [&] { code = d_.primary_retain(&primary, 0); });
    if (code != kSuccess) throw CudaError{code, name_of(d_, code)};
    const Result pushed = d_.context_push(primary);
    if (pushed != kSuccess) throw CudaError{pushed, name_of(d_, pushed)};
    pushed_ = true;
  }
  ~WithContext() {
    Context ignored = nullptr;
    if (pushed_) d_.context_pop(&ignored);
  }
  WithContext(const WithContext&) = delete;
  WithContext& operator=(const WithContext&) = delete;

 private:
  const Driver& d_;
  bool pushed_ = false;
};

class DriverRegistrar final : public Registrar {
 public:
  explicit DriverRegistrar(const Driver& d) : d_{d} {}

  void add(void* at, std::size_t bytes) override {
    const WithContext context{d_};
    if (const Result code = d_.host_register(at, bytes, kPortable); code != kSuccess) {
      throw CudaError{code, name_of(d_, code)};
    }
  }

  // Errors are ignored: at process exit the driver, and with it the memory, may already be gone.
  void remove(void* at) noexcept override {
    wait_for_copies();
    try {
      const WithContext context{d_};
      d_.host_unregister(at);
    } catch (const CudaError&) {
      return;
    }
  }

 private:
  // torch's pinned allocator records an event per stream. This code does not know the streams, so
  // it waits for every device that has a context.
  void wait_for_copies() noexcept {
    for (Device device = 0; device < d_.found.num_devices; ++device) {
      unsigned flags = 0;
      int active = 0;
      Context context = nullptr;
      if (d_.primary_state(device, &flags, &active) != kSuccess || active == 0) continue;
      if (d_.primary_retain(&context, device) != kSuccess) continue;
      if (d_.context_push(context) == kSuccess) {
        d_.context_synchronize();
        d_.context_pop(&context);
      }
      d_.primary_release(device);
    }
  }

  const Driver& d_;
};

}  // namespace

const Cuda& find_cuda() { return driver().found; }

Registrar& cuda_registrar() {
  if (find_cuda().num_devices == 0) throw CudaError{kNoDevice, find_cuda().why_none};
  static DriverRegistrar registrar{driver()};
  return registrar;
}

}  // namespace penstock
