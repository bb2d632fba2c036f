// Collectives of a phantom link, named as NCCL names its kernels. Plain C at the border: no headers of torch.
//
//   nvcc -O2 -shared -Xcompiler -fPIC -arch=sm_90 kernels.cu -o libloopback.so
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

enum Type { BYTES = 0, F32 = 1, F64 = 2, F16 = 3, BF16 = 4, I32 = 5, I64 = 6 };

struct Move {
  void* dst;
  const void* src;
  unsigned long long bytes;
  float factor;
  int type;  // BYTES: copied as they are
};

// All moves of one kernel: 64 * 32 bytes, well below the limit on what a kernel takes by value.
constexpr int MAX_MOVES = 64;
struct Moves {
  Move move[MAX_MOVES];
  int count;
};

template <typename T, typename Factor>
__device__ void scale(const Move& m, size_t first, size_t step) {
  auto dst = static_cast<T*>(m.dst);
  auto src = static_cast<const T*>(m.src);
  for (size_t i = first; i < m.bytes / sizeof(T); i += step) dst[i] = T(Factor(src[i]) * Factor(m.factor));
}

__device__ void copy(const Move& m, size_t first, size_t step) {
  bool aligned = ((size_t)m.dst | (size_t)m.src) % 16 == 0;
  size_t wide = aligned ? m.bytes / 16 : 0;
  auto dst = static_cast<uint4*>(m.dst);
  auto src = static_cast<const uint4*>(m.src);
  for (size_t i = first; i < wide; i += step) dst[i] = src[i];
  auto dst_bytes = static_cast<char*>(m.dst);
  auto src_bytes = static_cast<const char*>(m.src);
  for (size_t i = 16 * wide + first; i < m.bytes; i += step) dst_bytes[i] = src_bytes[i];
}

__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Moves the bytes once, which is traffic of the device's memory, then holds its SMs until the link's time is over.
__device__ void transfer(const Moves& moves, unsigned long long length_ns) {
  unsigned long long begin = nanoseconds();
  size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = gridDim.x * (size_t)blockDim.x;
  for (int i = 0; i < moves.count; ++i) {
    const Move& m = moves.move[i];
    switch (m.type) {
      case F32: scale<float, float>(m, first, step); break;
      case F64: scale<double, double>(m, first, step); break;
      case F16: scale<__half, float>(m, first, step); break;
      case BF16: scale<__nv_bfloat16, float>(m, first, step); break;
      case I32: scale<int, int>(m, first, step); break;
      case I64: scale<long long, long long>(m, first, step); break;
      default: copy(m, first, step);
    }
  }
  while (nanoseconds() - begin < length_ns) __nanosleep(200);
}

#define KERNEL(NAME) \
  extern "C" __global__ void NAME(Moves moves, unsigned long long length_ns) { transfer(moves, length_ns); }
KERNEL(ncclDevKernel_AllReduce_Loop)
KERNEL(ncclDevKernel_AllGather_Loop)
KERNEL(ncclDevKernel_ReduceScatter_Loop)
KERNEL(ncclDevKernel_Broadcast_Loop)
KERNEL(ncclDevKernel_SendRecv)

// In the order of `kind`.
static const void* const KERNELS[] = {
    (const void*)ncclDevKernel_AllReduce_Loop, (const void*)ncclDevKernel_AllGather_Loop,
    (const void*)ncclDevKernel_ReduceScatter_Loop, (const void*)ncclDevKernel_Broadcast_Loop,
    (const void*)ncclDevKernel_SendRecv};
constexpr int NUM_KERNELS = sizeof(KERNELS) / sizeof(KERNELS[0]);

// Shared memory of each block. With that much of an SM gone, the large tiles of matrix products find no place beside it.
constexpr int SHARED_BYTES = 96 * 1024;

// Lets the kernels have it, or as much as the device allows; once in a process, for its one device.
static cudaError_t shared_bytes(int* bytes) {
  static int allowed = -1;
  if (allowed < 0) {
    int device, most;
    cudaError_t error = cudaGetDevice(&device);
    if (!error) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error) return error;
    int wanted = most < SHARED_BYTES ? most : SHARED_BYTES;
    for (int i = 0; i < NUM_KERNELS; ++i) {
      error = cudaFuncSetAttribute(KERNELS[i], cudaFuncAttributeMaxDynamicSharedMemorySize, wanted);
      if (error) return error;
    }
    allowed = wanted;
  }
  *bytes = allowed;
  return cudaSuccess;
}

// Launches one kernel. Returns a cudaError_t.
extern "C" int loopback_launch(int kind, const Move* moves, int count, int ctas, unsigned long long length_ns,
                               void* stream) {
  if (kind < 0 || kind >= NUM_KERNELS || count > MAX_MOVES) return cudaErrorInvalidValue;
  Moves all;
  all.count = count;
  for (int i = 0; i < count; ++i) all.move[i] = moves[i];
  int shared;
  cudaError_t error = shared_bytes(&shared);
  if (error) return error;
  void* arguments[] = {&all, &length_ns};
  return cudaLaunchKernel(KERNELS[kind], dim3(ctas), dim3(512), arguments, shared, static_cast<cudaStream_t>(stream));
}

extern "C" int loopback_max_moves() { return MAX_MOVES; }
extern "C" int loopback_move_bytes() { return sizeof(Move); }
