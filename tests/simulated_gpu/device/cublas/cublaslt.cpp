// cuBLASLt: torch's products with a bias. Types and the numbers of attributes are declared by hand.
#include <cstdint>
#include <cstring>

#include "product.h"

using Status = int;

namespace {

constexpr Status success = 0, execution_failed = 13, not_supported = 15;
constexpr int layout_batch = 5, layout_stride = 6;
constexpr int transpose_a = 3, transpose_b = 4, epilogue = 7, bias_address = 8, bias_type = 26;
constexpr int multiprocessor_target = 15;
// Of what is done with results: nothing, the greater of it and zero, a bias added.
constexpr int32_t with_nothing = 1, with_relu = 2, with_bias = 4;
constexpr int compute_in_tf32 = 77;

struct Layout {
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t column;  // elements from one to the next
  int32_t batch = 1;
  int64_t stride = 0;
};

struct Product {
  int compute_type;
  cudaDataType_t scale_type;
  int32_t transpose_a = 0, transpose_b = 0, multiprocessors = 0, epilogue = with_nothing;
  char* bias = nullptr;
  int32_t bias_type = -1;
};

compute::Matrix matrix(const void* at, const Layout* layout, bool transposed) {
  return {static_cast<char*>(const_cast<void*>(at)), cublas::number_type(layout->type).value(), layout->column,
          layout->stride, transposed};
}

// What a product computes; empty: not known.
compute::Work work_of(const Product& product, const void* alpha, const void* a, const Layout* layout_a, const void* b,
                      const Layout* layout_b, const void* beta, const void* c, const Layout* layout_c, void* to,
                      const Layout* layout_to) {
  for (const Layout* layout : {layout_a, layout_b, layout_c, layout_to})
    if (!cublas::number_type(layout->type)) return {};
  if (product.epilogue & ~(with_nothing | with_relu | with_bias)) return {};
  bool doubles = product.scale_type == CUDA_R_64F;
  auto number = [=](const void* at) {
    return doubles ? *static_cast<const double*>(at) : *static_cast<const float*>(at);
  };
  compute::Product found{static_cast<int64_t>(layout_to->rows), static_cast<int64_t>(layout_to->columns),
                         static_cast<int64_t>(product.transpose_a ? layout_a->rows : layout_a->columns),
                         layout_to->batch, matrix(a, layout_a, product.transpose_a != 0),
                         matrix(b, layout_b, product.transpose_b != 0), matrix(c, layout_c, false),
                         matrix(to, layout_to, false)};
  found.alpha = number(alpha);
  found.beta = number(beta);
  if (product.epilogue & with_bias) {
    found.bias = product.bias;
    auto type = product.bias_type < 0 ? layout_to->type : static_cast<cudaDataType_t>(product.bias_type);
    if (!cublas::number_type(type)) return {};
    found.bias_type = *cublas::number_type(type);
  }
  if (product.epilogue & with_relu) found.finish = [](double value) { return value < 0 ? 0 : value; };
  return compute::product(found);
}

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
                                           int64_t column) {
  *layout = new Layout{type, rows, columns, column};
  return success;
}
EXPORTED Status cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return success;
}
EXPORTED Status cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t) {
  if (attribute == layout_batch) memcpy(&layout->batch, value, sizeof layout->batch);
  if (attribute == layout_stride) memcpy(&layout->stride, value, sizeof layout->stride);
  return success;
}

EXPORTED Status cublasLtMatmulDescCreate(Product** product, int compute_type, cudaDataType_t scale_type) {
  *product = new Product{compute_type, scale_type};
  return success;
}
EXPORTED Status cublasLtMatmulDescDestroy(Product* product) {
  delete product;
  return success;
}
EXPORTED Status cublasLtMatmulDescSetAttribute(Product* product, int attribute, const void* value, size_t) {
  if (attribute == transpose_a) memcpy(&product->transpose_a, value, sizeof product->transpose_a);
  if (attribute == transpose_b) memcpy(&product->transpose_b, value, sizeof product->transpose_b);
  if (attribute == epilogue) memcpy(&product->epilogue, value, sizeof product->epilogue);
  if (attribute == bias_address) memcpy(&product->bias, value, sizeof product->bias);
  if (attribute == bias_type) memcpy(&product->bias_type, value, sizeof product->bias_type);
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

EXPORTED Status cublasLtMatmul(void*, Product* product, const void* alpha, const void* at_a, Layout* a,
                               const void* at_b, Layout* b, const void* beta, const void* at_c, Layout* c, void* to,
                               Layout* layout_to, const void*, void*, size_t, void* stream) {
  compute::Work work;
  if (simulation::settings().computes) {
    work = work_of(*product, alpha, at_a, a, at_b, b, beta, at_c, c, to, layout_to);
    if (!work) {
      compute::refuse("a product of cuBLASLt with epilogue " + std::to_string(product->epilogue));
      return not_supported;
    }
  }
  uint64_t inner = product->transpose_a ? a->rows : a->columns;
  // torch asks for it for factors of 32 bit alone.
  std::string type = product->compute_type == compute_in_tf32 ? "tf32" : cublas::type_name(a->type);
  bool done = cublas::enqueue_product(stream, type, "gemm_bias", static_cast<double>(c->rows),
                                      static_cast<double>(c->columns), static_cast<double>(inner), c->batch,
                                      product->multiprocessors, std::move(work));
  return done ? success : execution_failed;
}

}  // extern "C"
