// Names of kernels, taken apart: what a template is made of tells what a kernel does, and of which types.
#pragma once

#include <string>
#include <vector>

namespace compute {

// A name such as "reduce_kernel<512, 1, ReduceOp<...> >": its last component and its arguments.
struct Template {
  std::string base;
  std::vector<std::string> arguments;
};

// A demangled name without torch's namespaces and what a function returns.
std::string plain_name(const std::string& mangled);
Template take_apart(const std::string& name);
// The arguments of a name that stands anywhere in another: of "sum_functor" in "...sum_functor<float, float>...".
std::vector<std::string> arguments_of(const std::string& base, const std::string& name);

// A lambda: the function it stands in, its parameters, and its number there.
struct Lambda {
  std::string function;
  std::vector<std::string> parameters;
  int number = 0;
  int first_number = 0;  // of the lambda directly in the function, for those that are nested
};
bool is_lambda(const std::string& name);
Lambda lambda(const std::string& name);

}  // namespace compute
