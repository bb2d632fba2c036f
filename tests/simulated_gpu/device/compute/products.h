// Matrix products that compute. Matrices lie in columns, as cuBLAS has them.
#pragma once

#include <cstdint>
#include <functional>

#include "../core/simulation.h"
#include "values.h"

namespace compute {

using Work = std::function<void(Writes&)>;

// Lets a task do work: it reads when it begins, and its results are there when it ends, unless what it read has changed
// by then.
EXPORTED void attach(simulation::Task& task, Work work);
// Says once that something cannot be computed, and what.
EXPORTED void refuse(const std::string& name);

struct Matrix {
  char* at = nullptr;
  Type type = Type::float32;
  int64_t column = 0, batch = 0;  // elements from one to the next
  bool transposed = false;
};

struct Product {
  int64_t m, n, k, batches;
  Matrix a, b, c, to;
  double alpha = 1, beta = 0;
  char* bias = nullptr;  // one for each row
  Type bias_type = Type::float32;
  std::function<double(double)> finish = nullptr;
};
EXPORTED Work product(const Product& product);

}  // namespace compute
