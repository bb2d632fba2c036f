// Memory: the device's lies in the host's, with a limit; copies move it.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "../compute/products.h"
#include "../core/capture.h"
#include "runtime.h"

using simulation::ApiCall;
using simulation::Class;
using simulation::Kind;
using simulation::Task;

namespace runtime {
namespace {

class Memory {
 public:
  static Memory& get() {
    static Memory& once = *new Memory;
    return once;
  }

  void* allocate(size_t size, bool on_host) {
    size = (std::max<size_t>(size, 1) + 4095) & ~size_t{4095};
    std::lock_guard<std::mutex> held(lock_);
    int device = simulation::current_device();
    if (!on_host && used_[device] + size > simulation::settings().memory_bytes) return nullptr;
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return nullptr;
    blocks_[reinterpret_cast<uintptr_t>(address)] = {size, device, on_host};
    if (!on_host) used_[device] += size;
    return address;
  }

  bool free(void* address) {
    std::lock_guard<std::mutex> held(lock_);
    auto entry = blocks_.find(reinterpret_cast<uintptr_t>(address));
    if (entry == blocks_.end()) return false;
    if (!entry->second.on_host) used_[entry->second.device] -= entry->second.size;
    munmap(address, entry->second.size);
    blocks_.erase(entry);
    return true;
  }

  // Memory of the host's own that is to count as pinned.
  void pin(void* address, size_t size) {
    std::lock_guard<std::mutex> held(lock_);
    blocks_[reinterpret_cast<uintptr_t>(address)] = {size, simulation::current_device(), true};
  }

  void unpin(void* address) {
    std::lock_guard<std::mutex> held(lock_);
    blocks_.erase(reinterpret_cast<uintptr_t>(address));
  }

  Block at(const void* address) {
    std::lock_guard<std::mutex> held(lock_);
    auto place = reinterpret_cast<uintptr_t>(address);
    auto entry = blocks_.upper_bound(place);
    if (entry == blocks_.begin()) return {0, 0, true};
    --entry;
    return place < entry->first + entry->second.size ? entry->second : Block{0, 0, true};
  }

  size_t used(int device) {
    std::lock_guard<std::mutex> held(lock_);
    return used_[device];
  }

 private:
  std::mutex lock_;
  std::map<uintptr_t, Block> blocks_;
  std::map<int, size_t> used_;
};

constexpr double copy_base_ns = 1500;

double duration_ns(cudaMemcpyKind kind, size_t size, bool between_devices) {
  const simulation::Settings& settings = simulation::settings();
  if (kind != cudaMemcpyDeviceToDevice)
    return copy_base_ns + static_cast<double>(size) / settings.host_link_bytes_per_ns;
  if (between_devices) return copy_base_ns + static_cast<double>(size) / settings.link_bytes_per_ns;
  return copy_base_ns + 2.0 * static_cast<double>(size) / settings.memory_bytes_per_ns;  // read and written
}

cudaMemcpyKind kind_by_addresses(const Block& to, const Block& from) {
  bool onto_device = to.size && !to.on_host, off_device = from.size && !from.on_host;
  if (onto_device) return off_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
  return off_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
}

std::shared_ptr<Task> copy_task(cudaMemcpyKind kind, size_t size, const Block& target, const Block& source) {
  auto task = std::make_shared<Task>();
  task->kind = Kind::memcpy;
  task->task_class = Class::copy;
  task->name = kind == cudaMemcpyHostToDevice   ? "Memcpy HtoD"
               : kind == cudaMemcpyDeviceToHost ? "Memcpy DtoH"
                                                : "Memcpy DtoD";
  task->bytes = size;
  task->copy_kind = kind;
  task->alone_ns = duration_ns(kind, size, target.size && source.size && target.device != source.device);
  return task;
}

// Rows of bytes, which are read at the copy's end, or where kernels compute at its begin. `staged` holds them, if not
// the caller.
void set_rows(Task& task, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
              std::shared_ptr<std::vector<char>> staged = nullptr) {
  auto *target = static_cast<char*>(to);
  auto *source = static_cast<const char*>(from);
  if (simulation::settings().computes) {
    compute::attach(task, [=, held = std::move(staged)](compute::Writes& writes) {
      for (size_t row = 0; row < height; row++) writes.put(target + row * to_pitch, source + row * from_pitch, width);
    });
    return;
  }
  task.effect = [=, held = std::move(staged)] {
    for (size_t row = 0; row < height; row++) memmove(target + row * to_pitch, source + row * from_pitch, width);
  };
}

cudaError_t copy(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t stream, bool wait) {
  NEED_DEVICE;
  Block target = block_at(to), source = block_at(from);
  if (kind == cudaMemcpyDefault) kind = kind_by_addresses(target, source);
  if (wait) {
    if (cudaError_t error = simulation::check_asked(stream)) return fail(error);
  }
  std::shared_ptr<Task> task = copy_task(kind, size, target, source);
  bool captured = simulation::is_capturing(stream);
  if (kind == cudaMemcpyHostToDevice && !source.size && !captured) {
    // Pageable memory may change as soon as the call is over; a graph reads it at each launch.
    auto staged =
        std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + size);
    set_rows(*task, to, size, staged->data(), size, size, 1, staged);
  } else {
    set_rows(*task, to, size, from, size, size, 1);
  }
  if (int error = simulation::enqueue(stream, std::move(task))) return result(error);
  if (!captured && (wait || (kind == cudaMemcpyDeviceToHost && !target.size))) simulation::wait_for_stream(stream);
  return lost();
}

}  // namespace

Block block_at(const void* address) { return Memory::get().at(address); }

}  // namespace runtime

using namespace runtime;

extern "C" {

EXPORTED cudaError_t cudaMalloc(void** address, size_t size) {
  ApiCall call(CALL_ID(cudaMalloc_v3020));
  NEED_DEVICE;
  if (cudaError_t error = simulation::check_unsafe()) return fail(error);
  *address = Memory::get().allocate(size, false);
  return *address ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

EXPORTED cudaError_t cudaFree(void* address) {
  ApiCall call(CALL_ID(cudaFree_v3020));
  if (!address) return cudaSuccess;
  if (cudaError_t error = simulation::check_unsafe()) return fail(error);
  simulation::wait_for_device(simulation::current_device());
  NEED_DEVICE;
  return Memory::get().free(address) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

EXPORTED cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t) {
  NEED_DEVICE;
  *address = Memory::get().allocate(size, false);
  if (!*address) {
    // For what is to be freed, on whatever stream. CUDA lets this stream wait for it, here the host waits.
    simulation::wait_for_device(simulation::current_device());
    *address = Memory::get().allocate(size, false);
  }
  return *address ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

EXPORTED cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  if (simulation::is_capturing(stream)) return cudaSuccess;  // the graph's launches use it: it stays
  std::shared_ptr<Task> task = simulation::mark(Kind::host_function);
  task->effect = [=] { Memory::get().free(address); };
  return result(simulation::enqueue(stream, std::move(task)));
}

EXPORTED cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  static char only;
  *pool = reinterpret_cast<cudaMemPool_t>(&only);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
EXPORTED cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
EXPORTED cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
EXPORTED cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = Memory::get().used(simulation::current_device());
  return cudaSuccess;
}

EXPORTED cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  NEED_DEVICE;
  if (cudaError_t error = simulation::check_unsafe()) return fail(error);
  *address = Memory::get().allocate(size, true);
  return *address ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

EXPORTED cudaError_t cudaFreeHost(void* address) {
  if (cudaError_t error = simulation::check_unsafe()) return fail(error);
  if (address) Memory::get().free(address);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  if (cudaError_t error = simulation::check_unsafe()) return fail(error);
  Memory::get().pin(address, size);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaHostUnregister(void* address) {
  if (cudaError_t error = simulation::check_unsafe()) return fail(error);
  Memory::get().unpin(address);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemGetInfo(size_t* left, size_t* total) {
  NEED_DEVICE;
  *total = simulation::settings().memory_bytes;
  *left = *total - Memory::get().used(simulation::current_device());
  return cudaSuccess;
}

EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  memset(found, 0, sizeof *found);
  Block block = block_at(address);
  if (!block.size) {
    found->type = cudaMemoryTypeUnregistered;
    return cudaSuccess;
  }
  found->type = block.on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  found->device = block.device;
  found->devicePointer = const_cast<void*>(address);
  found->hostPointer = block.on_host ? const_cast<void*>(address) : nullptr;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                                     cudaStream_t stream) {
  ApiCall call(CALL_ID(cudaMemcpyAsync_v3020));
  return copy(to, from, size, kind, stream, false);
}

EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  ApiCall call(CALL_ID(cudaMemcpy_v3020));
  return copy(to, from, size, kind, nullptr, true);
}

EXPORTED cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  ApiCall call(CALL_ID(cudaMemcpyPeerAsync_v4000));
  return copy(to, from, size, cudaMemcpyDeviceToDevice, stream, false);
}

EXPORTED cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                       size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  ApiCall call(CALL_ID(cudaMemcpy2DAsync_v3020));
  NEED_DEVICE;
  Block target = block_at(to), source = block_at(from);
  if (kind == cudaMemcpyDefault) kind = kind_by_addresses(target, source);
  std::shared_ptr<Task> task = copy_task(kind, width * height, target, source);
  set_rows(*task, to, to_pitch, from, from_pitch, width, height);
  bool captured = simulation::is_capturing(stream);
  if (int error = simulation::enqueue(stream, std::move(task))) return result(error);
  // Pageable memory may change after the call.
  if (!captured && (!target.size || !source.size)) simulation::wait_for_stream(stream);
  return lost();
}

EXPORTED cudaError_t cudaMemsetAsync(void* address, int value, size_t size, cudaStream_t stream) {
  ApiCall call(CALL_ID(cudaMemsetAsync_v3020));
  NEED_DEVICE;
  auto task = std::make_shared<Task>();
  task->kind = Kind::memset;
  task->task_class = Class::copy;
  task->name = "Memset (Device)";
  task->bytes = size;
  task->copy_kind = value;
  task->alone_ns = copy_base_ns + static_cast<double>(size) / simulation::settings().memory_bytes_per_ns;
  if (simulation::settings().computes) {
    compute::attach(*task, [=](compute::Writes& writes) {
      std::vector<char> bytes(size, static_cast<char>(value));
      writes.put(address, bytes.data(), size);
    });
  } else {
    task->effect = [=] { memset(address, value, size); };
  }
  return result(simulation::enqueue(stream, std::move(task)));
}

EXPORTED cudaError_t cudaMemset(void* address, int value, size_t size) {
  if (cudaError_t error = simulation::check_asked(nullptr)) return fail(error);
  cudaMemsetAsync(address, value, size, nullptr);
  simulation::wait_for_stream(nullptr);
  return lost();
}

}  // extern "C"
