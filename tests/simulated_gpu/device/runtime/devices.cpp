// Devices, their properties, and errors.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "../core/capture.h"
#include "runtime.h"

#undef cudaGetDeviceProperties

namespace runtime {
namespace {

thread_local cudaError_t error_of_thread = cudaSuccess;
thread_local std::string refused;  // the kernel that could not be computed

// Those of an H100, so that what libraries choose by them is what they would choose there.
constexpr int capability[2] = {9, 0};
constexpr int shared_per_block = 49152, shared_per_block_opt_in = 232448, shared_per_multiprocessor = 233472;
constexpr int l2_bytes = 50 << 20, registers = 65536, threads_per_multiprocessor = 2048, first_bus = 0x10;

bool exists(int device) { return device >= 0 && device < simulation::settings().devices; }

}  // namespace

cudaError_t fail(cudaError_t error) { return error_of_thread = error; }
cudaError_t result(int error) { return error ? fail(static_cast<cudaError_t>(error)) : cudaSuccess; }
cudaError_t last_error() { return lost() ? lost() : error_of_thread; }
cudaError_t refuse(const std::string& kernel) {
  refused = "the simulated GPU cannot compute " + kernel;
  return fail(cudaErrorNotSupported);
}
cudaError_t take_error() {
  cudaError_t error = error_of_thread;
  error_of_thread = cudaSuccess;
  return lost() ? lost() : error;
}

}  // namespace runtime

using namespace runtime;

extern "C" {

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  *count = simulation::settings().devices;
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

EXPORTED cudaError_t cudaGetDevice(int* device) {
  *device = simulation::current_device();
  return cudaSuccess;
}

EXPORTED cudaError_t cudaSetDevice(int device) {
  NEED_DEVICE;
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  simulation::set_current_device(device);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  memset(found, 0, sizeof *found);
  snprintf(found->name, sizeof found->name, "Simulated GPU (no hardware)");
  // As the scripted NVML has it: GPU-fa0e0000-0000-4000-8000-000000000000 and so on.
  const unsigned char uuid[16] = {0xfa, 0x0e, 0, static_cast<unsigned char>(device), 0, 0, 0x40, 0, 0x80};
  memcpy(found->uuid.bytes, uuid, sizeof uuid);
  found->uuid.bytes[15] = static_cast<char>(device);
  found->totalGlobalMem = simulation::settings().memory_bytes;
  found->sharedMemPerBlock = shared_per_block;
  found->sharedMemPerBlockOptin = shared_per_block_opt_in;
  found->sharedMemPerMultiprocessor = shared_per_multiprocessor;
  found->reservedSharedMemPerBlock = 1024;
  found->regsPerBlock = found->regsPerMultiprocessor = registers;
  found->warpSize = 32;
  found->memPitch = 2147483647;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->totalConstMem = 65536;
  found->major = capability[0];
  found->minor = capability[1];
  found->textureAlignment = 512;
  found->texturePitchAlignment = 32;
  found->multiProcessorCount = simulation::settings().multiprocessors;
  found->maxThreadsPerMultiProcessor = threads_per_multiprocessor;
  found->maxBlocksPerMultiProcessor = 32;
  found->memoryBusWidth = 5120;
  found->l2CacheSize = l2_bytes;
  found->pciBusID = first_bus + device;
  found->asyncEngineCount = 3;
  found->canMapHostMemory = found->concurrentKernels = found->unifiedAddressing = found->managedMemory = 1;
  found->streamPrioritiesSupported = found->cooperativeLaunch = found->hostRegisterSupported = 1;
  found->memoryPoolsSupported = found->clusterLaunch = 1;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMultiProcessorCount: *value = simulation::settings().multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = capability[0]; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability[1]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = shared_per_block; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_per_block_opt_in; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = shared_per_multiprocessor; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = threads_per_multiprocessor; break;
    case cudaDevAttrClockRate: *value = 1'980'000; break;
    case cudaDevAttrMemoryClockRate: *value = 2'619'000; break;
    case cudaDevAttrL2CacheSize: *value = l2_bytes; break;
    case cudaDevAttrPciBusId: *value = first_bus + device; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
    case cudaDevAttrMaxRegistersPerBlock: *value = registers; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (!exists(device)) return fail(cudaErrorInvalidDevice);
  snprintf(text, size, "0000:%02X:00.0", first_bus + device);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceSynchronize() {
  simulation::ApiCall call(CALL_ID(cudaDeviceSynchronize_v3020));
  if (cudaError_t error = simulation::check_asked_device(simulation::current_device())) return fail(error);
  simulation::wait_for_device(simulation::current_device());
  return lost();
}

EXPORTED cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORTED cudaError_t cudaProfilerStop() { return cudaSuccess; }
EXPORTED cudaError_t cudaGetLastError() { return take_error(); }
EXPORTED cudaError_t cudaPeekAtLastError() { return last_error(); }

EXPORTED const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorIllegalState: return "cudaErrorIllegalState";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureMerge: return "cudaErrorStreamCaptureMerge";
    case cudaErrorStreamCaptureUnmatched: return "cudaErrorStreamCaptureUnmatched";
    case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    case cudaErrorStreamCaptureWrongThread: return "cudaErrorStreamCaptureWrongThread";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "another error of the simulated GPU";
  }
}

EXPORTED const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory (simulated GPU)";
    case cudaErrorNotReady: return "not ready (simulated GPU)";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state (simulated GPU)";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing (simulated GPU)";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture (simulated GPU)";
    case cudaErrorStreamCaptureMerge: return "two captures would become one (simulated GPU)";
    case cudaErrorStreamCaptureUnmatched: return "the capture did not begin on this stream (simulated GPU)";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work (simulated GPU)";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream (simulated GPU)";
    case cudaErrorStreamCaptureImplicit:
      return "the legacy stream would depend on a capturing stream (simulated GPU)";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream (simulated GPU)";
    case cudaErrorStreamCaptureWrongThread: return "another thread began the capture (simulated GPU)";
    case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotSupported:
      return refused.empty() ? "the simulated GPU does not have this function" : refused.c_str();
    default: {
      static thread_local char text[64];
      snprintf(text, sizeof text, "error %d of the simulated GPU", static_cast<int>(error));
      return text;
    }
  }
}

EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, symbol) : nullptr;
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
