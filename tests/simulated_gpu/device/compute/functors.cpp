#include "functors.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "names.h"

namespace compute {
namespace {

using Scalar2 = std::function<double(double, double)>;

size_t aligned(size_t offset, size_t alignment) { return (offset + alignment - 1) / alignment * alignment; }

// Numbers that an object holds, one after another.
class Members {
 public:
  explicit Members(const char* object) : object_(object) {}
  double next(Type type) {
    at_ = aligned(at_, width_of(type));
    double value = load(type, object_ + at_);
    at_ += width_of(type);
    return value;
  }
  const char* next_address() {
    at_ = aligned(at_, sizeof(char*)) + sizeof(char*);
    return read<const char*>(object_ + at_ - sizeof(char*));
  }
  int next_int() { return static_cast<int>(next(Type::int32)); }
  // An object without members has a byte.
  void skip(size_t bytes) { at_ += bytes; }
  size_t end() const { return at_; }

 private:
  const char* object_;
  size_t at_ = 0;
};

bool ordered(int which, double a, double b) {
  const bool found[] = {a >= b, a > b, a <= b, a < b};
  return found[which & 3];
}

// With NaN where either is.
double greater(double a, double b) { return std::isnan(a) ? a : std::isnan(b) ? b : std::fmax(a, b); }
double lesser(double a, double b) { return std::isnan(a) ? a : std::isnan(b) ? b : std::fmin(a, b); }

double gelu(double x) { return 0.5 * x * (1 + std::erf(x * M_SQRT1_2)); }
double gelu_slope(double x) {
  return 0.5 * (1 + std::erf(x * M_SQRT1_2)) + x * std::exp(-0.5 * x * x) * M_2_SQRTPI * M_SQRT1_2 * 0.5;
}
constexpr double gelu_factor = M_SQRT2 * M_2_SQRTPI * 0.5, gelu_cubic = 0.044715;
double gelu_tanh(double x) { return 0.5 * x * (1 + std::tanh(gelu_factor * (x + gelu_cubic * x * x * x))); }
double gelu_tanh_slope(double x) {
  double inner = std::tanh(gelu_factor * (x + gelu_cubic * x * x * x));
  return 0.5 * (1 + inner) + 0.5 * x * (1 - inner * inner) * gelu_factor * (1 + 3 * gelu_cubic * x * x);
}
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Lambdas of one number without members, by the function that they stand in.
const std::map<std::string, double (*)(double)>& plain_functions() {
  static const auto& once = *new std::map<std::string, double (*)(double)>{
      {"neg_kernel_cuda", [](double x) { return -x; }},
      {"exp_kernel_cuda", [](double x) { return std::exp(x); }},
      {"expm1_kernel_cuda", [](double x) { return std::expm1(x); }},
      {"log_kernel_cuda", [](double x) { return std::log(x); }},
      {"log1p_kernel_cuda", [](double x) { return std::log1p(x); }},
      {"log2_kernel_cuda", [](double x) { return std::log2(x); }},
      {"sqrt_kernel_cuda", [](double x) { return std::sqrt(x); }},
      {"rsqrt_kernel_cuda", [](double x) { return 1 / std::sqrt(x); }},
      {"reciprocal_kernel_cuda", [](double x) { return 1 / x; }},
      {"tanh_kernel_cuda", [](double x) { return std::tanh(x); }},
      {"sigmoid_kernel_cuda", sigmoid},
      {"sin_kernel_cuda", [](double x) { return std::sin(x); }},
      {"cos_kernel_cuda", [](double x) { return std::cos(x); }},
      {"erf_kernel_cuda", [](double x) { return std::erf(x); }},
      {"floor_kernel_cuda", [](double x) { return std::floor(x); }},
      {"ceil_kernel_cuda", [](double x) { return std::ceil(x); }},
      {"trunc_kernel_cuda", [](double x) { return std::trunc(x); }},
      {"round_kernel_cuda", [](double x) { return std::nearbyint(x); }},
      {"sign_kernel_cuda", [](double x) { return double((x > 0) - (x < 0)); }},
      {"silu_kernel", [](double x) { return x * sigmoid(x); }},
  };
  return once;
}

const std::map<std::string, double (*)(double)>& plain_tests() {
  static const auto& once = *new std::map<std::string, double (*)(double)>{
      {"logical_not_kernel_cuda", [](double x) { return double(x == 0); }},
      {"bitwise_not_kernel_cuda", [](double x) { return double(x == 0); }},
      {"isnan_kernel_cuda", [](double x) { return double(std::isnan(x)); }},
      {"isposinf_kernel_impl", [](double x) { return double(std::isinf(x) && x > 0); }},
      {"isneginf_kernel_impl", [](double x) { return double(std::isinf(x) && x < 0); }},
  };
  return once;
}

double lerp(double a, double b, double weight) {
  return weight < 0.5 ? a + weight * (b - a) : b - (b - a) * (1 - weight);
}

// Lambdas of two numbers without members.
const std::map<std::string, double (*)(double, double)>& plain_pairs() {
  static const auto& once = *new std::map<std::string, double (*)(double, double)>{
      {"maximum_kernel_cuda", greater},
      {"minimum_kernel_cuda", lesser},
      {"tanh_backward_kernel_cuda", [](double a, double b) { return a * (1 - b * b); }},
      {"sigmoid_backward_kernel_cuda", [](double a, double b) { return a * (1 - b) * b; }},
      {"silu_backward_kernel",
       [](double a, double x) { return a * sigmoid(x) * (1 + x * (1 - sigmoid(x))); }},
      {"mse_kernel_cuda", [](double a, double b) { return (a - b) * (a - b); }},
      {"logical_and_kernel_cuda", [](double a, double b) { return double(a != 0 && b != 0); }},
      {"logical_or_kernel_cuda", [](double a, double b) { return double(a != 0 || b != 0); }},
      {"pow_tensor_tensor_kernel", [](double a, double b) { return std::pow(a, b); }},
      {"logical_xor_kernel_cuda", [](double a, double b) { return double((a != 0) != (b != 0)); }},
  };
  return once;
}

// An operation of two numbers that stands in BinaryFunctor and its like, and the bytes of its object.
struct Operation {
  Scalar2 scalar;
  size_t size = 1;
};

std::optional<Operation> operation(const std::string& name, const char* object, Type type) {
  if (is_lambda(name)) {
    Lambda found = lambda(name);
    if (found.function == "threshold_kernel_impl") {
      Members members(object);
      double threshold = members.next(type), value = members.next(type);
      return Operation{[=](double x, double other) { return x <= threshold ? value : other; }, 2 * width_of(type)};
    }
    auto entry = plain_pairs().find(found.function);
    if (entry == plain_pairs().end()) return {};
    return Operation{entry->second};
  }
  std::string base = take_apart(name).base;
  if (base == "MulFunctor") return Operation{[](double a, double b) { return a * b; }};
  if (base == "DivFunctor") return Operation{[](double a, double b) { return a / b; }};
  if (base == "BitwiseAndFunctor" && type == Type::boolean)
    return Operation{[](double a, double b) { return double(a != 0 && b != 0); }};
  if (base == "BitwiseOrFunctor" && type == Type::boolean)
    return Operation{[](double a, double b) { return double(a != 0 || b != 0); }};
  if (base == "BitwiseXorFunctor" && type == Type::boolean)
    return Operation{[](double a, double b) { return double((a != 0) != (b != 0)); }};
  if (base == "CompareEqFunctor") {
    bool unequal = read<int>(object) != 0;
    return Operation{[=](double a, double b) { return double((a == b) != unequal); }, sizeof(int)};
  }
  return {};
}

// The type of the number that an operation takes on one side.
std::optional<Type> number_of_operation(const std::string& name, size_t side) {
  std::vector<std::string> given = is_lambda(name) ? lambda(name).parameters : take_apart(name).arguments;
  if (given.empty()) return {};
  return type_named(given[std::min(side, given.size() - 1)]);
}

std::optional<Functor> binary(const Template& parts, const char* object) {
  auto first = type_named(parts.arguments[0]), second = type_named(parts.arguments[1]);
  auto result = type_named(parts.arguments[2]);
  if (!first || !second || !result) return {};
  auto found = operation(parts.arguments[3], object, *first);
  if (!found) return {};
  Scalar2 scalar = found->scalar;
  if (parts.base == "BinaryFunctor") return Functor{{*first, *second}, *result, each2(scalar), false, found->size};
  // One side is a number, which lies behind the operation's object.
  bool left = parts.base == "AUnaryFunctor";
  auto type = number_of_operation(parts.arguments[3], left ? 0 : 1);
  if (!type) return {};
  Members members(object);
  members.skip(found->size);
  double number = members.next(*type);
  size_t size = members.end();
  if (left) return Functor{{*second}, *result, each1([=](double b) { return scalar(number, b); }), false, size};
  return Functor{{*first}, *result, each1([=](double a) { return scalar(a, number); }), false, size};
}

std::optional<Functor> named(const Template& parts, const char* object) {
  if (parts.arguments.size() == 4) return binary(parts, object);
  auto type = parts.arguments.empty() ? std::nullopt : type_named(parts.arguments[0]);
  if (!type) return {};
  Members members(object);
  if (parts.base == "FillFunctor") {
    double value = members.next(*type);
    return Functor{{}, *type, [=](double* results, const double* const*, int count) {
                     for (int i = 0; i < count; i++) results[i] = value;
                   }};
  }
  if (parts.base == "CUDAFunctor_add") {
    double alpha = members.next(wide(*type));
    auto add = each2([=](double a, double b) { return a + alpha * b; });
    return Functor{{*type, *type}, *type, add, false, members.end()};
  }
  if (parts.base == "CUDAFunctorOnSelf_add") {
    double other = members.next(wide(*type)), alpha = members.next(wide(*type));
    return Functor{{*type}, *type, each1([=](double a) { return a + alpha * other; }), false, members.end()};
  }
  if (parts.base == "CUDAFunctorOnOther_add") {
    double self = members.next(wide(*type)), alpha = members.next(wide(*type));
    return Functor{{*type}, *type, each1([=](double b) { return self + alpha * b; }), false, members.end()};
  }
  if (parts.base == "AbsFunctor") return Functor{{*type}, *type, each1([](double a) { return std::fabs(a); })};
  if (parts.base == "CompareFunctor") {
    int which = members.next_int();
    return Functor{{*type, *type}, Type::boolean, each2([=](double a, double b) {
                     return double(ordered(which, a, b));
                   })};
  }
  return {};
}

std::optional<Functor> of_one(const Lambda& found, Type type, Members members) {
  const std::string& in = found.function;
  Type number = wide(type);
  if (in == "direct_copy_kernel_cuda") {
    return Functor{{type}, type, each1([](double a) { return a; }), true};
  }
  if (in == "bfloat16_copy_kernel_cuda") return Functor{{type}, Type::bfloat16, each1([](double a) { return a; })};
  if (in == "float16_copy_kernel_cuda") return Functor{{type}, Type::half, each1([](double a) { return a; })};
  if (in == "bfloat16tofloat32_copy_kernel_cuda" || in == "float16tofloat32_copy_kernel_cuda")
    return Functor{{type}, Type::float32, each1([](double a) { return a; })};
  if (in == "GeluCUDAKernelImpl") return Functor{{type}, type, each1(found.first_number == 1 ? gelu_tanh : gelu)};
  if (in == "pow_tensor_scalar_kernel_impl") {
    switch (found.number) {
      case 1: return Functor{{type}, type, each1([](double a) { return a * a; })};
      case 2: return Functor{{type}, type, each1([](double a) { return a * a * a; })};
      case 3: return Functor{{type}, type, each1([](double a) { return 1 / (a * a); })};
      default: {
        double exponent = members.next(type);
        return Functor{{type}, type, each1([=](double a) { return std::pow(a, exponent); })};
      }
    }
  }
  if (in == "launch_clamp_scalar") {
    int kind = members.next_int();  // both limits, the lower, the upper
    double low = members.next(number), high = members.next(number);
    return Functor{{type}, type, each1([=](double a) {
                     if (std::isnan(a)) return a;
                     if (kind == 0) return std::fmax(a, low);
                     if (kind == 1) return std::fmin(a, low);
                     return std::fmin(std::fmax(a, low), high);
                   })};
  }
  if (in == "compare_scalar_kernel") {
    int which = members.next_int();
    double right = members.next(type);
    return Functor{{type}, Type::boolean, each1([=](double a) { return double(ordered(which, a, right)); })};
  }
  if (in == "leaky_relu_kernel") {
    double slope = members.next(number);
    return Functor{{type}, type, each1([=](double a) { return a > 0 ? a : a * slope; })};
  }
  auto test = plain_tests().find(in);
  if (test != plain_tests().end() && (in != "bitwise_not_kernel_cuda" || type == Type::boolean))
    return Functor{{type}, Type::boolean, each1(test->second)};
  auto entry = plain_functions().find(in);
  if (entry != plain_functions().end()) return Functor{{type}, type, each1(entry->second)};
  return {};
}

std::optional<Functor> of_two(const Lambda& found, Type first, Type second, Members members) {
  const std::string& in = found.function;
  std::vector<Type> inputs{first, second};
  if (in == "GeluBackwardCUDAKernelImpl") {
    auto slope = found.first_number == 1 ? gelu_tanh_slope : gelu_slope;
    return Functor{inputs, first, each2([=](double gradient, double x) { return gradient * slope(x); })};
  }
  if (in == "masked_fill_kernel") {
    double value = members.next(first);
    return Functor{inputs, first, each2([=](double a, double mask) { return mask != 0 ? value : a; })};
  }
  if (in == "masked_scale_kernel") {
    double scale = members.next(Type::float32);
    return Functor{inputs, first, each2([=](double a, double mask) { return a * mask * scale; })};
  }
  if (in == "lerp_scalar_kernel") {
    double weight = members.next(wide(first));
    return Functor{inputs, first, each2([=](double a, double b) { return lerp(a, b, weight); })};
  }
  auto entry = plain_pairs().find(in);
  if (entry != plain_pairs().end()) return Functor{inputs, first, each2(entry->second)};
  return {};
}

std::optional<Functor> of_three(const Lambda& found, const std::vector<Type>& inputs, Members members) {
  const std::string& in = found.function;
  if (in == "where_kernel_impl")
    return Functor{inputs, inputs[1], each3([](double which, double a, double b) { return which != 0 ? a : b; })};
  if (in == "lerp_tensor_kernel") return Functor{inputs, inputs[0], each3(lerp)};
  if (in == "launch_masked_scatter_kernel") {
    auto* source = members.next_address();
    Type type = inputs[0];
    return Functor{inputs, type, each3([=](double a, double mask, double place) {
                     size_t at = static_cast<size_t>(place) * width_of(type);
                     return mask != 0 ? load(type, source + at) : a;
                   })};
  }
  double number = 0;
  if (in == "addcmul_cuda_kernel" || in == "addcdiv_cuda_kernel" || in == "mse_backward_cuda_kernel")
    number = members.next(wide(inputs[0]));
  if (in == "addcmul_cuda_kernel")
    return Functor{inputs, inputs[0], each3([=](double a, double b, double c) { return a + number * (b * c); })};
  if (in == "addcdiv_cuda_kernel")
    return Functor{inputs, inputs[0], each3([=](double a, double b, double c) { return a + number * (b / c); })};
  if (in == "mse_backward_cuda_kernel")
    return Functor{inputs, inputs[0], each3([=](double a, double b, double c) { return number * (a - b) * c; })};
  return {};
}

}  // namespace

std::optional<Functor> functor(const std::string& name, const char* object) {
  Template parts = take_apart(name);
  bool operates = parts.base == "BinaryFunctor" || parts.base == "AUnaryFunctor" || parts.base == "BUnaryFunctor";
  if (operates || !is_lambda(name)) return named(parts, object);
  Lambda found = lambda(name);
  std::vector<Type> inputs;
  for (const std::string& parameter : found.parameters) {
    auto type = type_named(parameter);
    if (!type) return {};
    inputs.push_back(*type);
  }
  Members members(object);
  switch (inputs.size()) {
    case 1: return of_one(found, inputs[0], members);
    case 2: return of_two(found, inputs[0], inputs[1], members);
    case 3: return of_three(found, inputs, members);
    default: return {};
  }
}

}  // namespace compute
