// What element-wise kernels compute of each element.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "values.h"

namespace compute {

using Function = std::function<void(double* results, const double* const* inputs, int count)>;

struct Functor {
  std::vector<Type> inputs;
  Type result;
  Function function;
  bool moves = false;  // gives back its input as it is
  size_t size = 1;     // bytes of its object, where it is known
};

// The functor of a name; its object is at `object`. None: not known.
std::optional<Functor> functor(const std::string& name, const char* object);

template <class Scalar>
Function each1(Scalar scalar) {
  return [scalar](double* results, const double* const* in, int count) {
    for (int i = 0; i < count; i++) results[i] = scalar(in[0][i]);
  };
}
template <class Scalar>
Function each2(Scalar scalar) {
  return [scalar](double* results, const double* const* in, int count) {
    for (int i = 0; i < count; i++) results[i] = scalar(in[0][i], in[1][i]);
  };
}
template <class Scalar>
Function each3(Scalar scalar) {
  return [scalar](double* results, const double* const* in, int count) {
    for (int i = 0; i < count; i++) results[i] = scalar(in[0][i], in[1][i], in[2][i]);
  };
}

}  // namespace compute
