// cuBLAS, as far as torch's products ask for it. Types are declared by hand: its headers come in a package of 423 MB.
#include <algorithm>

#include "product.h"

using Status = int;
using Stream = void*;
using Int = int;
using Offset = long long;
using Type = cudaDataType_t;
using compute::Matrix;
using compute::Product;

namespace {

constexpr Status success = 0, invalid_value = 7, execution_failed = 13, not_supported = 15;
// The lowest bits of a math mode are one of several; those above are flags.
constexpr int math_modes = 15, tf32_mode = 3;

struct Handle {
  Stream stream = nullptr;
  int pointer_mode = 0, math_mode = 0, multiprocessors = 0;
};

// A factor that lies on the host; where kernels do not compute nothing is read.
double number(const void* at, bool is_double) {
  if (!simulation::settings().computes) return 0;
  return is_double ? *static_cast<const double*>(at) : *static_cast<const float*>(at);
}

Matrix matrix(const void* at, Type type, Int column, Offset batch, bool transposed) {
  Matrix found{static_cast<char*>(const_cast<void*>(at)), compute::Type::float32, column, batch, transposed};
  if (auto known = cublas::number_type(type)) found.type = *known;
  return found;
}

Status enqueue(Handle* handle, std::string type, const char* what, const Product& product) {
  if (simulation::settings().computes && handle->pointer_mode != 0) {
    compute::refuse("a product with factors on the device");
    return not_supported;
  }
  if (type == "f32" && (handle->math_mode & math_modes) == tf32_mode) type = "tf32";
  bool done = cublas::enqueue_product(handle->stream, type, what, static_cast<double>(product.m),
                                      static_cast<double>(product.n), static_cast<double>(product.k),
                                      static_cast<double>(product.batches), handle->multiprocessors,
                                      compute::product(product));
  return done ? success : execution_failed;
}

// What all forms of a product have; m, n and k come after the two transpositions.
struct Sizes {
  int transpose_a, transpose_b;
  Int m, n, k;
  Offset batch_a = 0, batch_b = 0, batch_c = 0;
  Int batches = 0;  // one that is none
};

Status multiply(Handle* handle, const Sizes& sizes, Type type, Type type_c, bool doubles, const void* alpha,
                const void* a, Int column_a, const void* b, Int column_b, const void* beta, void* c, Int column_c) {
  bool known = cublas::number_type(type) && cublas::number_type(type_c);
  if (simulation::settings().computes && !known) {
    compute::refuse("a product of " + cublas::type_name(type));
    return not_supported;
  }
  Product product{sizes.m, sizes.n, sizes.k, std::max(1, sizes.batches), {}, {}, {}, {}};
  product.a = matrix(a, type, column_a, sizes.batch_a, sizes.transpose_a != 0);
  product.b = matrix(b, type, column_b, sizes.batch_b, sizes.transpose_b != 0);
  product.c = product.to = matrix(c, type_c, column_c, sizes.batch_c, false);
  if (handle->pointer_mode == 0) product.alpha = number(alpha, doubles), product.beta = number(beta, doubles);
  return enqueue(handle, cublas::type_name(type), sizes.batches ? "gemm_batched" : "gemm", product);
}

// A matrix by a vector, whose elements may lie apart: the vector is a matrix of one row.
Status multiply_vector(Handle* handle, bool transposed, Int m, Int n, Type type, const void* alpha, const void* a,
                       Int column_a, const void* x, Int step_x, const void* beta, void* y, Int step_y) {
  Product product{1, transposed ? n : m, transposed ? m : n, 1, {}, {}, {}, {}};
  product.a = matrix(x, type, step_x, 0, false);
  product.b = matrix(a, type, column_a, 0, !transposed);
  product.c = product.to = matrix(y, type, step_y, 0, false);
  bool doubles = type == CUDA_R_64F;
  if (handle->pointer_mode == 0) product.alpha = number(alpha, doubles), product.beta = number(beta, doubles);
  return enqueue(handle, cublas::type_name(type), "gemv", product);
}

Status dot(Handle* handle, Int n, Type type, const void* x, Int step_x, const void* y, Int step_y, void* result) {
  Product product{1, 1, n, 1, {}, {}, {}, {}};
  product.a = matrix(x, type, step_x, 0, false);
  product.b = matrix(y, type, step_y, 0, true);
  product.c = product.to = matrix(result, type, 1, 0, false);
  // Only the result is a number here, and torch's lies on the device.
  Handle own = *handle;
  own.pointer_mode = own.pointer_mode == 1 ? 0 : 1;
  return enqueue(&own, cublas::type_name(type), "dot", product);
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

EXPORTED Status cublasSgemm_v2(Handle* handle, int ta, int tb, Int m, Int n, Int k, const float* alpha, const float* a,
                               Int lda, const float* b, Int ldb, const float* beta, float* c, Int ldc) {
  return multiply(handle, {ta, tb, m, n, k}, CUDA_R_32F, CUDA_R_32F, false, alpha, a, lda, b, ldb, beta, c, ldc);
}
EXPORTED Status cublasDgemm_v2(Handle* handle, int ta, int tb, Int m, Int n, Int k, const double* alpha,
                               const double* a, Int lda, const double* b, Int ldb, const double* beta, double* c,
                               Int ldc) {
  return multiply(handle, {ta, tb, m, n, k}, CUDA_R_64F, CUDA_R_64F, true, alpha, a, lda, b, ldb, beta, c, ldc);
}
EXPORTED Status cublasSgemmEx(Handle* handle, int ta, int tb, Int m, Int n, Int k, const float* alpha, const void* a,
                              Type type, Int lda, const void* b, Type, Int ldb, const float* beta, void* c, Type type_c,
                              Int ldc) {
  return multiply(handle, {ta, tb, m, n, k}, type, type_c, false, alpha, a, lda, b, ldb, beta, c, ldc);
}
EXPORTED Status cublasGemmEx(Handle* handle, int ta, int tb, Int m, Int n, Int k, const void* alpha, const void* a,
                             Type type, Int lda, const void* b, Type, Int ldb, const void* beta, void* c, Type type_c,
                             Int ldc, int, int) {
  return multiply(handle, {ta, tb, m, n, k}, type, type_c, type == CUDA_R_64F, alpha, a, lda, b, ldb, beta, c, ldc);
}
EXPORTED Status cublasSgemmStridedBatched(Handle* handle, int ta, int tb, Int m, Int n, Int k, const float* alpha,
                                          const float* a, Int lda, Offset stride_a, const float* b, Int ldb,
                                          Offset stride_b, const float* beta, float* c, Int ldc, Offset stride_c,
                                          Int batch) {
  return multiply(handle, {ta, tb, m, n, k, stride_a, stride_b, stride_c, batch}, CUDA_R_32F, CUDA_R_32F, false, alpha,
                  a, lda, b, ldb, beta, c, ldc);
}
EXPORTED Status cublasDgemmStridedBatched(Handle* handle, int ta, int tb, Int m, Int n, Int k, const double* alpha,
                                          const double* a, Int lda, Offset stride_a, const double* b, Int ldb,
                                          Offset stride_b, const double* beta, double* c, Int ldc, Offset stride_c,
                                          Int batch) {
  return multiply(handle, {ta, tb, m, n, k, stride_a, stride_b, stride_c, batch}, CUDA_R_64F, CUDA_R_64F, true, alpha,
                  a, lda, b, ldb, beta, c, ldc);
}
EXPORTED Status cublasGemmStridedBatchedEx(Handle* handle, int ta, int tb, Int m, Int n, Int k, const void* alpha,
                                           const void* a, Type type, Int lda, Offset stride_a, const void* b, Type,
                                           Int ldb, Offset stride_b, const void* beta, void* c, Type type_c, Int ldc,
                                           Offset stride_c, Int batch, int, int) {
  return multiply(handle, {ta, tb, m, n, k, stride_a, stride_b, stride_c, batch}, type, type_c, type == CUDA_R_64F,
                  alpha, a, lda, b, ldb, beta, c, ldc);
}

EXPORTED Status cublasSgemv_v2(Handle* handle, int transpose, Int m, Int n, const float* alpha, const float* a, Int lda,
                               const float* x, Int step_x, const float* beta, float* y, Int step_y) {
  return multiply_vector(handle, transpose != 0, m, n, CUDA_R_32F, alpha, a, lda, x, step_x, beta, y, step_y);
}
EXPORTED Status cublasDgemv_v2(Handle* handle, int transpose, Int m, Int n, const double* alpha, const double* a,
                               Int lda, const double* x, Int step_x, const double* beta, double* y, Int step_y) {
  return multiply_vector(handle, transpose != 0, m, n, CUDA_R_64F, alpha, a, lda, x, step_x, beta, y, step_y);
}

EXPORTED Status cublasSdot_v2(Handle* handle, Int n, const float* x, Int step_x, const float* y, Int step_y,
                              float* result) {
  return dot(handle, n, CUDA_R_32F, x, step_x, y, step_y, result);
}
EXPORTED Status cublasDdot_v2(Handle* handle, Int n, const double* x, Int step_x, const double* y, Int step_y,
                              double* result) {
  return dot(handle, n, CUDA_R_64F, x, step_x, y, step_y, result);
}

}  // extern "C"
