// Softmax, norms and the loss of classes.
#include <cmath>
#include <limits>

#include "compute.h"

namespace compute {
namespace {

// A tensor of outer x size x inner elements, normalised along the middle.
struct Spatial {
  int64_t outer, size, inner;
};

using OfRow = std::function<void(std::vector<std::vector<double>>& inputs, std::vector<double>& result)>;

Work along(Spatial shape, char* to, Type result_type, std::vector<std::pair<char*, Type>> inputs, OfRow compute) {
  return [=](Writes& writes) {
    auto width = static_cast<int64_t>(width_of(result_type));
    std::vector<double> result(shape.size);
    std::vector<std::vector<double>> rows(inputs.size(), std::vector<double>(shape.size));
    for (int64_t outer = 0; outer < shape.outer; outer++) {
      for (int64_t inner = 0; inner < shape.inner; inner++) {
        int64_t first = outer * shape.size * shape.inner + inner;
        for (size_t k = 0; k < inputs.size(); k++) {
          auto size = static_cast<int64_t>(width_of(inputs[k].second));
          load_many(inputs[k].second, inputs[k].first + first * size, size * shape.inner,
                    static_cast<int>(shape.size), rows[k].data());
        }
        compute(rows, result);
        for (int64_t i = 0; i < shape.size; i++)
          writes.put(to + (first + i * shape.inner) * width, result_type, result[i]);
      }
    }
  };
}

Work forward(Spatial shape, char* to, Type result, char* from, Type type, bool logarithm) {
  return along(shape, to, result, {{from, type}}, [=](auto& rows, auto& found) {
    double most = -std::numeric_limits<double>::infinity(), sum = 0;
    for (double value : rows[0]) most = value > most || std::isnan(value) ? value : most;
    for (double value : rows[0]) sum += std::exp(value - most);
    for (size_t i = 0; i < found.size(); i++)
      found[i] = logarithm ? rows[0][i] - most - std::log(sum) : std::exp(rows[0][i] - most) / sum;
  });
}

// `gradient` is the output's; without logarithms torch has already multiplied it by the output.
Work backward(Spatial shape, char* to, Type result, char* gradient, char* output, Type type, bool logarithm) {
  return along(shape, to, result, {{gradient, type}, {output, type}}, [=](auto& rows, auto& found) {
    double sum = 0;
    for (double value : rows[0]) sum += value;
    for (size_t i = 0; i < found.size(); i++)
      found[i] = rows[0][i] - (logarithm ? std::exp(rows[1][i]) : rows[1][i]) * sum;
  });
}

struct Norm {
  int64_t rows, size;
  char *gradient, *input, *mean, *scale;
  Type type, numbers;
  bool centred;
};

// The gradient of the input: of x, with g the gradient times the weight, (g - mean(g) - x' mean(g x')) * scale.
void norm_gradient(const Norm& norm, char* weight, char* to, Writes& writes) {
  auto width = static_cast<int64_t>(width_of(norm.type));
  std::vector<double> g(norm.size), x(norm.size);
  for (int64_t row = 0; row < norm.rows; row++) {
    double mean = norm.centred ? load(norm.numbers, norm.mean + row * 4) : 0;
    double scale = load(norm.numbers, norm.scale + row * 4);
    double sum = 0, product = 0;
    for (int64_t i = 0; i < norm.size; i++) {
      g[i] = load(norm.type, norm.gradient + (row * norm.size + i) * width);
      if (weight) g[i] *= load(norm.type, weight + i * width);
      x[i] = (load(norm.type, norm.input + (row * norm.size + i) * width) - mean) * scale;
      sum += g[i];
      product += g[i] * x[i];
    }
    auto size = static_cast<double>(norm.size);
    if (!norm.centred) sum = 0;
    for (int64_t i = 0; i < norm.size; i++)
      writes.put(to + (row * norm.size + i) * width, norm.type, (g[i] - sum / size - x[i] * product / size) * scale);
  }
}

void weight_gradients(const Norm& norm, char* of_weight, char* of_bias, Writes& writes) {
  auto width = static_cast<int64_t>(width_of(norm.type));
  for (int64_t i = 0; i < norm.size; i++) {
    double weight = 0, bias = 0;
    for (int64_t row = 0; row < norm.rows; row++) {
      double gradient = load(norm.type, norm.gradient + (row * norm.size + i) * width);
      double mean = norm.centred ? load(norm.numbers, norm.mean + row * 4) : 0;
      double x = load(norm.type, norm.input + (row * norm.size + i) * width) - mean;
      weight += gradient * x * load(norm.numbers, norm.scale + row * 4);
      bias += gradient;
    }
    if (of_weight) writes.put(of_weight + i * width, norm.type, weight);
    if (of_bias && norm.centred) writes.put(of_bias + i * width, norm.type, bias);
  }
}

Work norm_forward(const Launch& launch, Type type, bool centred) {
  int64_t size = launch.argument<int>(0), rows = launch.grid.x;
  double epsilon = launch.argument<float>(1);
  char *input = launch.address(2), *weight = launch.address(3), *bias = launch.address(4);
  char *means = launch.address(5), *scales = launch.address(6), *to = launch.address(7);
  return [=](Writes& writes) {
    auto width = static_cast<int64_t>(width_of(type));
    std::vector<double> x(size);
    for (int64_t row = 0; row < rows; row++) {
      load_many(type, input + row * size * width, width, static_cast<int>(size), x.data());
      double mean = 0, square = 0;
      if (centred)
        for (double value : x) mean += value / static_cast<double>(size);
      for (double value : x) square += (value - mean) * (value - mean);
      double scale = 1 / std::sqrt(square / static_cast<double>(size) + epsilon);
      for (int64_t i = 0; i < size; i++) {
        double value = (x[i] - mean) * scale;
        if (weight) value *= load(type, weight + i * width);
        if (bias) value += load(type, bias + i * width);
        writes.put(to + (row * size + i) * width, type, value);
      }
      if (means && centred) writes.put(means + row * 4, Type::float32, mean);
      writes.put(scales + row * 4, Type::float32, scale);
    }
  };
}

}  // namespace

Work softmax(const Launch& launch) {
  const std::string& base = launch.parts.base;
  const std::vector<std::string>& given = launch.parts.arguments;
  bool logarithm = launch.name.find("LogSoftMax") != std::string::npos;
  if (base == "softmax_warp_forward" || base == "softmax_warp_backward") {
    bool is_forward = base == "softmax_warp_forward";
    int first = is_forward ? 2 : 3;
    auto source = type_named(given[0]), result = type_named(given[1]);
    if (!source || !result || given[5] != "false") return {};
    // Rows lie one after another; their distance is an argument too.
    if (launch.argument<int>(first + 1) != launch.argument<int>(first + 2)) return {};
    Spatial shape{launch.argument<int>(first), launch.argument<int>(first + 2), 1};
    logarithm = given[4] == "true";
    if (is_forward) return forward(shape, launch.address(0), *result, launch.address(1), *source, logarithm);
    return backward(shape, launch.address(0), *result, launch.address(1), launch.address(2), *source, logarithm);
  }
  if (base.compare(0, 5, "cunn_")) return {};
  bool is_forward = base.find("Forward") != std::string::npos, spatial = base.find("Spatial") != std::string::npos;
  // Some begin with how many elements a thread takes at once.
  size_t at = isdigit(given[0][0]) ? 1 : 0;
  auto source = type_named(given[at]), result = type_named(given[at + 2]);
  if (!source || !result) return {};
  int first = is_forward ? 2 : 3;
  Spatial shape{launch.grid.x, 0, 1};
  if (spatial) shape = {launch.argument<int>(first), launch.argument<int>(first + 1), launch.argument<int>(first + 2)};
  else shape.size = launch.argument<int64_t>(first);
  if (is_forward) return forward(shape, launch.address(0), *result, launch.address(1), *source, logarithm);
  return backward(shape, launch.address(0), *source, launch.address(2), launch.address(1), *result, logarithm);
}

Work norm(const Launch& launch) {
  const std::string& base = launch.parts.base;
  const std::vector<std::string>& given = launch.parts.arguments;
  bool is_forward = base == "vectorized_layer_norm_kernel";
  bool of_input = base == "layer_norm_grad_input_kernel_vectorized" || base == "layer_norm_grad_input_kernel";
  bool of_weight = base == "GammaBetaBackwardCUDAKernelTemplate" || base == "GammaBetaBackwardSimpleCUDAKernel";
  if (!is_forward && !of_input && !of_weight) return {};
  auto type = type_named(given[0]);
  if (!type || given[1] != "float") return {};
  bool centred = given.back() != "true";
  if (is_forward) return norm_forward(launch, *type, centred);
  if (of_input) {
    Norm norm{launch.grid.x,     launch.argument<int>(6), launch.address(0), launch.address(1),
              launch.address(2), launch.address(3),       *type,             Type::float32,
              centred};
    return [=, weight = launch.address(4), to = launch.address(5)](Writes& writes) {
      norm_gradient(norm, weight, to, writes);
    };
  }
  Norm norm{launch.argument<int64_t>(0), launch.argument<int64_t>(1), launch.address(2), launch.address(3),
            launch.address(4),           launch.address(5),           *type,             Type::float32,
            centred};
  return [=, weight = launch.address(6), bias = launch.address(7)](Writes& writes) {
    weight_gradients(norm, weight, bias, writes);
  };
}

// The loss of rows of classes, without weights.
Work loss(const Launch& launch) {
  const std::string& base = launch.parts.base;
  bool is_forward = base == "nll_loss_forward_reduce_cuda_kernel_2d";
  if (!is_forward && base != "nll_loss_backward_reduce_cuda_kernel_2d") return {};
  auto type = type_named(launch.parts.arguments[0]), index = type_named(launch.parts.arguments.back());
  if (!type || !index) return {};
  auto width = static_cast<int64_t>(width_of(*type)), index_width = static_cast<int64_t>(width_of(*index));
  if (is_forward) {
    char *to = launch.address(0), *total_to = launch.address(1), *input = launch.address(2);
    char *targets = launch.address(3), *weights = launch.address(4);
    bool mean = launch.argument<bool>(5);
    int64_t rows = launch.argument<int64_t>(6), classes = launch.argument<int64_t>(7);
    int64_t ignored = launch.argument<int64_t>(9);
    return [=](Writes& writes) {
      double sum = 0, total = 0;
      for (int64_t row = 0; row < rows; row++) {
        auto target = static_cast<int64_t>(load(*index, targets + row * index_width));
        if (target == ignored) continue;
        bool exists = target >= 0 && target < classes;
        double weight = weights && exists ? load(*type, weights + target * width) : 1;
        sum -= exists ? weight * load(*type, input + (row * classes + target) * width) : NAN;
        total += weight;
      }
      writes.put(to, *type, mean ? sum / total : sum);
      writes.put(total_to, *type, total);
    };
  }
  char *to = launch.address(0), *gradient = launch.address(1), *targets = launch.address(2);
  char *weights = launch.address(3), *total = launch.address(4);
  bool mean = launch.argument<bool>(5);
  int64_t rows = launch.argument<int>(6), classes = launch.argument<int>(7), ignored = launch.argument<int64_t>(9);
  return [=](Writes& writes) {
    double given = -(mean ? load(*type, gradient) / load(*type, total) : load(*type, gradient));
    for (int64_t row = 0; row < rows; row++) {
      auto target = static_cast<int64_t>(load(*index, targets + row * index_width));
      if (target == ignored || target < 0 || target >= classes) continue;
      double weight = weights ? load(*type, weights + target * width) : 1;
      writes.put(to + (row * classes + target) * width, *type, given * weight);
    }
  };
}

}  // namespace compute
