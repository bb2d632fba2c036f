// The CUDA driver, as far as torch asks for it: it does its work through the runtime.
#include <cuda.h>

#include "../core/simulation.h"

extern "C" {

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
