// The CUDA driver, as far as torch asks for it: it does its work through the runtime.
#include <cuda.h>

#include "../core/simulation.h"

namespace {

CUresult enqueue(simulation::Kind kind, CUstream stream, CUdeviceptr address, cuuint32_t value) {
  std::shared_ptr<simulation::Task> task = simulation::mark(kind);
  task->word = reinterpret_cast<std::atomic<uint32_t>*>(address);
  task->value = value;
  return static_cast<CUresult>(simulation::enqueue(stream, std::move(task)));
}

}  // namespace

extern "C" {

EXPORTED CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) {
  return enqueue(simulation::Kind::value_write, stream, address, value);
}
EXPORTED CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_NOT_SUPPORTED;
  return enqueue(simulation::Kind::value_wait, stream, address, value);
}

EXPORTED CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "error of the simulated GPU's driver";
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetCurrent(CUcontext* context) {
  static char only;
  *context = reinterpret_cast<CUcontext>(&only);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;  // none of the driver's features: no virtual memory, no multicast
  return CUDA_SUCCESS;
}

}  // extern "C"
