// Kernels that compute: what a kernel of torch does to memory, by its name and its arguments. The layouts of arguments
// are those of torch 2.13.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

#include "names.h"
#include "values.h"

namespace compute {

// Reads the inputs, and says what is to be written.
using Work = std::function<void(Writes&)>;

struct Launch {
  std::string name;  // plain
  Template parts;    // of the name
  void** arguments;
  dim3 grid, block;

  template <class Value>
  Value argument(int index) const {
    return read<Value>(arguments[index]);
  }
  char* address(int index) const { return argument<char*>(index); }
};

// Each takes a kernel apart; empty where it is none of its own.
Work elementwise(const Launch& launch);
Work reduction(const Launch& launch);
Work softmax(const Launch& launch);
Work norm(const Launch& launch);
Work loss(const Launch& launch);
Work rows(const Launch& launch);
Work indexing(const Launch& launch);
Work scatter(const Launch& launch);
Work placement(const Launch& launch);
Work many_tensors(const Launch& launch);
Work random_numbers(const Launch& launch);
Work attention(const Launch& launch);

// What a kernel computes. Empty: not known.
Work work_of(const std::string& mangled, void** arguments, dim3 grid, dim3 block);

}  // namespace compute
