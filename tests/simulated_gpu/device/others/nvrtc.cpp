// NVRTC: there, but the simulated GPU compiles nothing.
#include "../core/simulation.h"

extern "C" {

EXPORTED int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
EXPORTED const char* nvrtcGetErrorString(int) { return "the simulated GPU compiles nothing"; }

}  // extern "C"
