// Kernels: their names, and how they get onto a stream.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../compute/compute.h"
#include "../compute/products.h"
#include "../core/capture.h"
#include "runtime.h"

namespace runtime {
namespace {

using simulation::ApiCall;
using simulation::Task;

// torch's libraries register their kernels when they are loaded, before anything else of the runtime is called.
struct Code {
  std::mutex lock;
  std::unordered_map<const void*, std::string> kernels;
  std::unordered_map<const void*, void*> variables;
};

Code& code() {
  static Code& once = *new Code;
  return once;
}

std::string kernel_name(const void* function) {
  std::lock_guard<std::mutex> held(code().lock);
  auto entry = code().kernels.find(function);
  return entry == code().kernels.end() ? "unknown_kernel" : entry->second;
}

double duration_ns(const std::string& name, dim3 grid, void** arguments) {
  const simulation::Settings& settings = simulation::settings();
  // torch.cuda._sleep: its argument counts cycles of the full clock.
  if (arguments && name.find("spin_kernel") != std::string::npos) {
    return static_cast<double>(*static_cast<int64_t*>(arguments[0])) / 1.98;
  }
  double own_ns;
  if (uint64_t bytes = elementwise_bytes(name, arguments)) {
    own_ns = static_cast<double>(bytes) / settings.memory_bytes_per_ns;
  } else {
    own_ns = settings.block_ns * grid.x * grid.y * grid.z;
  }
  return simulation::duration_by_rule(name, settings.kernel_ns + own_ns);
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, size_t shared, cudaStream_t stream, void** arguments) {
  NEED_DEVICE;
  auto task = std::make_shared<Task>();
  task->name = kernel_name(function);
  task->alone_ns = duration_ns(task->name, grid, arguments) * simulation::settings().compute_factor;
  task->grid[0] = grid.x, task->grid[1] = grid.y, task->grid[2] = grid.z;
  task->block[0] = block.x, task->block[1] = block.y, task->block[2] = block.z;
  task->shared_bytes = static_cast<uint32_t>(shared);
  if (arguments && simulation::settings().computes) {
    compute::Work work = compute::work_of(task->name, arguments, grid, block);
    if (work) {
      compute::attach(*task, std::move(work));
    } else {
      compute::refuse(task->name);
      if (!simulation::settings().traces) return refuse(simulation::demangled(task->name));
    }
  } else if (arguments) {
    Effect effect = effect_of(task->name, arguments, grid);
    task->effect = std::move(effect.work);
    task->bytes = effect.bytes;
  }
  return result(simulation::enqueue(stream, std::move(task)));
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace
}  // namespace runtime

using namespace runtime;

extern "C" {

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED char __cudaInitModule(void**) { return 1; }

EXPORTED void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                                     dim3*, int*) {
  std::lock_guard<std::mutex> held(code().lock);
  code().kernels.emplace(host, name);
}

EXPORTED void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t size, int, int) {
  std::lock_guard<std::mutex> held(code().lock);
  code().variables[host] = calloc(1, std::max<size_t>(size, 1));
}

EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return fail(cudaErrorMissingConfiguration);
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}

EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                                        cudaStream_t stream) {
  ApiCall call(CALL_ID(cudaLaunchKernel_v7000));
  return launch(kernel, grid, block, shared, stream, arguments);
}

EXPORTED cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                                      cudaStream_t stream) {
  ApiCall call(CALL_ID(cudaLaunchKernel_v7000));
  return launch(function, grid, block, shared, stream, arguments);
}

EXPORTED cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                                 size_t shared, cudaStream_t stream) {
  ApiCall call(CALL_ID(cudaLaunchCooperativeKernel_v9000));
  return launch(function, grid, block, shared, stream, arguments);
}

EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  ApiCall call(CALL_ID(cudaLaunchKernelExC_v11060));
  return launch(function, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream, arguments);
}

EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads,
                                                                            size_t, unsigned) {
  *blocks = std::clamp(2048 / std::max(threads, 1), 1, 32);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads,
                                                                   size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

EXPORTED cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  std::lock_guard<std::mutex> held(code().lock);
  auto entry = code().variables.find(symbol);
  if (entry == code().variables.end()) return fail(cudaErrorInvalidSymbol);
  *address = entry->second;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t size, size_t offset,
                                        cudaMemcpyKind) {
  if (cudaError_t error = simulation::check_unsafe()) return fail(error);
  void* address = nullptr;
  if (cudaError_t error = cudaGetSymbolAddress(&address, symbol)) return error;
  memcpy(static_cast<char*>(address) + offset, from, size);
  return cudaSuccess;
}

}  // extern "C"
