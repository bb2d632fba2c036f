// cuBLAS, as far as torch's products ask for it. Types are declared by hand: its headers come in a package of 423 MB.
#include "product.h"

using Status = int;
using Stream = void*;
using Int = int;
using Offset = long long;
using Type = cudaDataType_t;

namespace {

constexpr Status success = 0, invalid_value = 7;
// The lowest bits of a math mode are one of several; those above are flags.
constexpr int math_modes = 15, tf32_mode = 3;

struct Handle {
  Stream stream = nullptr;
  int pointer_mode = 0, math_mode = 0, multiprocessors = 0;
};

Status product(Handle* handle, std::string type, const char* what, double m, double n, double k, double batch) {
  if (type == "f32" && (handle->math_mode & math_modes) == tf32_mode) type = "tf32";
  cublas::enqueue_product(handle->stream, type, what, m, n, k, batch, handle->multiprocessors);
  return success;
}

}  // namespace

extern "C" {

EXPORTED Status cublasCreate_v2(Handle** handle) {
  *handle = new Handle;
  return success;
}
EXPORTED Status cublasDestroy_v2(Handle* handle) {
  delete handle;
  return success;
}
EXPORTED Status cublasSetStream_v2(Handle* handle, Stream stream) {
  handle->stream = stream;
  return success;
}
EXPORTED Status cublasSetWorkspace_v2(Handle*, void*, size_t) { return success; }
EXPORTED Status cublasSetSmCountTarget(Handle* handle, int multiprocessors) {
  if (multiprocessors < 0 || multiprocessors > simulation::settings().multiprocessors) return invalid_value;
  handle->multiprocessors = multiprocessors;
  return success;
}
EXPORTED Status cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return success;
}
EXPORTED Status cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return success;
}
EXPORTED Status cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointer_mode;
  return success;
}
EXPORTED Status cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return success;
}

// Of the arguments only the sizes matter: m, n and k come after the two transpositions.
EXPORTED Status cublasSgemm_v2(Handle* handle, int, int, Int m, Int n, Int k, ...) {
  return product(handle, "f32", "gemm", m, n, k, 1);
}
EXPORTED Status cublasDgemm_v2(Handle* handle, int, int, Int m, Int n, Int k, ...) {
  return product(handle, "f64", "gemm", m, n, k, 1);
}
EXPORTED Status cublasSgemmEx(Handle* handle, int, int, Int m, Int n, Int k, const float*, const void*, Type type,
                              ...) {
  return product(handle, cublas::type_name(type), "gemm", m, n, k, 1);
}
EXPORTED Status cublasGemmEx(Handle* handle, int, int, Int m, Int n, Int k, const void*, const void*, Type type, ...) {
  return product(handle, cublas::type_name(type), "gemm", m, n, k, 1);
}
EXPORTED Status cublasSgemmStridedBatched(Handle* handle, int, int, Int m, Int n, Int k, const float*, const float*,
                                          Int, Offset, const float*, Int, Offset, const float*, float*, Int, Offset,
                                          Int batch) {
  return product(handle, "f32", "gemm_batched", m, n, k, batch);
}
EXPORTED Status cublasDgemmStridedBatched(Handle* handle, int, int, Int m, Int n, Int k, const double*, const double*,
                                          Int, Offset, const double*, Int, Offset, const double*, double*, Int, Offset,
                                          Int batch) {
  return product(handle, "f64", "gemm_batched", m, n, k, batch);
}
EXPORTED Status cublasGemmStridedBatchedEx(Handle* handle, int, int, Int m, Int n, Int k, const void*, const void*,
                                           Type type, Int, Offset, const void*, Type, Int, Offset, const void*, void*,
                                           Type, Int, Offset, Int batch, int, int) {
  return product(handle, cublas::type_name(type), "gemm_batched", m, n, k, batch);
}
EXPORTED Status cublasSgemv_v2(Handle* handle, int, Int m, Int n, ...) {
  return product(handle, "f32", "gemv", m, n, 1, 1);
}
EXPORTED Status cublasSdot_v2(Handle* handle, Int n, ...) { return product(handle, "f32", "dot", 1, 1, n, 1); }

}  // extern "C"
