// What the files of the CUDA runtime share.
#pragma once

#include <cuda_runtime_api.h>
#include <cupti_runtime_cbid.h>

#include <cstdint>
#include <functional>
#include <string>

#include "../core/faults.h"
#include "../core/settings.h"
#include "../core/simulation.h"

// The number under which the profiler knows a function of the runtime.
#define CALL_ID(name) CUPTI_RUNTIME_TRACE_CBID_##name

namespace runtime {

cudaError_t fail(cudaError_t error);
// The error is kept for cudaGetLastError, if it is one.
cudaError_t result(int error);
// Takes the error that the next cudaGetLastError would give, and forgets it.
cudaError_t take_error();
cudaError_t last_error();
// The error of every call once the device is lost.
inline cudaError_t lost() { return static_cast<cudaError_t>(simulation::fault(simulation::Fault::device)); }
#define NEED_DEVICE \
  if (cudaError_t lost = runtime::lost()) return lost
// The same for a kernel that cannot be computed; the error's text names it.
cudaError_t refuse(const std::string& kernel);

struct Block {
  size_t size;
  int device;
  bool on_host;
};
// The allocation that an address lies in; size 0: none of ours.
Block block_at(const void* address);

// What a kernel does to memory: nothing, for all but the few of effects.cpp.
struct Effect {
  std::function<void()> work;
  uint64_t bytes = 0;
};
Effect effect_of(const std::string& name, void** arguments, dim3 grid);

// -- effects.cpp, for launches.cpp: bytes that an element-wise kernel reads and writes, 0 if it is none
uint64_t elementwise_bytes(const std::string& name, void** arguments);

}  // namespace runtime
