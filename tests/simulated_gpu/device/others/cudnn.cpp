// cuDNN: there, but it can do nothing. torch asks for its version when it shows what it was built with.
#include <cstddef>
#include <cstdlib>

#include "../core/simulation.h"

// On this device torch would take cuDNN's attention first; now it takes its own.
__attribute__((constructor)) static void loaded() { setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1", 0); }

extern "C" {

EXPORTED size_t cudnnGetVersion() { return 92000; }
EXPORTED size_t cudnnGetCudartVersion() { return 13000; }
EXPORTED const char* cudnnGetErrorString(int) { return "the simulated GPU has no cuDNN"; }
EXPORTED int cudnnGetProperty(int which, int* value) {
  constexpr int version[] = {9, 20, 0};
  *value = which >= 0 && which < 3 ? version[which] : 0;
  return 0;
}
EXPORTED int cudnnCreate(void** handle) {
  static char only;
  *handle = &only;
  return 0;
}
EXPORTED int cudnnSetStream(void*, void*) { return 0; }

}  // extern "C"
