// cuBLASLt: torch's products with a bias. Types and the numbers of attributes are declared by hand.
#include <cstdint>
#include <cstring>

#include "product.h"

using Status = int;

namespace {

constexpr Status success = 0;
constexpr int layout_batch = 5, transpose_a = 3, multiprocessor_target = 15;
constexpr int compute_in_tf32 = 77;

struct Layout {
  cudaDataType_t type;
  uint64_t rows, columns;
  int32_t batch = 1;
};

struct Product {
  int compute_type;
  int32_t transpose_a = 0, multiprocessors = 0;
};

// What the choice of an algorithm gives back.
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};

}  // namespace

extern "C" {

EXPORTED size_t cublasLtGetVersion() { return 130100; }

EXPORTED Status cublasLtMatrixLayoutCreate(Layout** layout, cudaDataType_t type, uint64_t rows, uint64_t columns,
                                           int64_t) {
  *layout = new Layout{type, rows, columns};
  return success;
}
EXPORTED Status cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return success;
}
EXPORTED Status cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t) {
  if (attribute == layout_batch) memcpy(&layout->batch, value, sizeof layout->batch);
  return success;
}

EXPORTED Status cublasLtMatmulDescCreate(Product** product, int compute_type, cudaDataType_t) {
  *product = new Product{compute_type};
  return success;
}
EXPORTED Status cublasLtMatmulDescDestroy(Product* product) {
  delete product;
  return success;
}
EXPORTED Status cublasLtMatmulDescSetAttribute(Product* product, int attribute, const void* value, size_t) {
  if (attribute == transpose_a) memcpy(&product->transpose_a, value, sizeof product->transpose_a);
  if (attribute == multiprocessor_target) memcpy(&product->multiprocessors, value, sizeof product->multiprocessors);
  return success;
}

EXPORTED Status cublasLtMatmulPreferenceCreate(void** preference) {
  *preference = new char;
  return success;
}
EXPORTED Status cublasLtMatmulPreferenceDestroy(void* preference) {
  delete static_cast<char*>(preference);
  return success;
}
EXPORTED Status cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return success; }

EXPORTED Status cublasLtMatmulAlgoGetHeuristic(void*, Product*, Layout*, Layout*, Layout*, Layout*, void*, int,
                                               Heuristic* found, int* count) {
  memset(found, 0, sizeof *found);
  found->waves = 1;
  *count = 1;
  return success;
}

EXPORTED Status cublasLtMatmul(void*, Product* product, const void*, const void*, Layout* a, const void*, Layout*,
                               const void*, const void*, Layout* c, void*, Layout*, const void*, void*, size_t,
                               void* stream) {
  uint64_t inner = product->transpose_a ? a->rows : a->columns;
  // torch asks for it for factors of 32 bit alone.
  std::string type = product->compute_type == compute_in_tf32 ? "tf32" : cublas::type_name(a->type);
  cublas::enqueue_product(stream, type, "gemm_bias", static_cast<double>(c->rows), static_cast<double>(c->columns),
                          static_cast<double>(inner), c->batch, product->multiprocessors);
  return success;
}

}  // extern "C"
