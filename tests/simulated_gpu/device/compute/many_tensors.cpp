// multi_tensor_apply: one kernel over many tensors, as optimizers and the clipping of gradients launch it.
#include <cmath>
#include <map>
#include <memory>

#include "compute.h"

namespace compute {
namespace {

constexpr int64_t chunk = 65536;
constexpr size_t most_blocks = 2240;

// A piece of a tensor that one block works on, in each list of tensors.
struct Piece {
  std::vector<char*> lists;
  int64_t count;
  double number = 0;       // of the tensor, in a list of numbers
  char* steps = nullptr;   // of the tensor, where an optimizer counts them
  int tensor = 0, chunk_index = 0;
};

enum class Form { plain, numbers, steps };

struct Pieces {
  std::vector<Piece> all;
  int depth = 0;
  int first_tensor = 0;
};

// Arrays by list and tensor: addresses, sizes, perhaps numbers or addresses of steps; then by block: tensor, chunk.
Pieces pieces(const char* meta, int depth, Form form, Type type, Type number_type, unsigned blocks) {
  static const size_t most_of[2][5] = {{770, 448, 336, 252, 210}, {672, 448, 336, 252, 210}};
  size_t most = most_of[form == Form::numbers][depth - 1];
  const char* sizes = meta + depth * most * 8;
  const char* extra = sizes + most * 8;
  size_t extra_bytes = form == Form::plain ? 0 : form == Form::steps ? 8 : width_of(number_type);
  const char* tensors = extra + most * extra_bytes;
  const char* chunks = tensors + most_blocks * 2;
  Pieces found;
  found.depth = depth;
  auto width = static_cast<int64_t>(width_of(type));
  for (unsigned block = 0; block < blocks; block++) {
    size_t tensor = read<uint16_t>(tensors + 2 * block);
    int64_t from = read<int>(chunks + 4 * block) * chunk;
    Piece piece;
    piece.count = std::min(chunk, read<int64_t>(sizes + 8 * tensor) - from);
    piece.tensor = static_cast<int>(tensor);
    piece.chunk_index = static_cast<int>(from / chunk);
    for (int list = 0; list < depth; list++)
      piece.lists.push_back(read<char*>(meta + (list * most + tensor) * 8) + from * width);
    if (form == Form::numbers) piece.number = load(number_type, extra + tensor * extra_bytes);
    if (form == Form::steps) piece.steps = read<char*>(extra + tensor * 8);
    found.all.push_back(piece);
  }
  if (form != Form::numbers) found.first_tensor = read<int>(chunks + 4 * most_blocks);
  return found;
}

using Pair = double (*)(double, double);

// Operations on numbers by name.
Pair pair_named(const std::string& name) {
  static const auto& once = *new std::map<std::string, Pair>{
      {"plus", [](double a, double b) { return a + b; }},
      {"minus", [](double a, double b) { return a - b; }},
      {"multiplies", [](double a, double b) { return a * b; }},
      {"divides", [](double a, double b) { return a / b; }},
      {"maximum", [](double a, double b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }},
      {"minimum", [](double a, double b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b); }},
      {"Maximum", [](double a, double b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }},
      {"Minimum", [](double a, double b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b); }},
      {"power_functor", [](double a, double b) { return std::pow(a, b); }},
      {"reverse_power_functor", [](double a, double b) { return std::pow(b, a); }},
      // Of one number: the second is not looked at.
      {"Sqrt", [](double a, double) { return std::sqrt(a); }},
      {"Rsqrt", [](double a, double) { return 1 / std::sqrt(a); }},
      {"Abs", [](double a, double) { return std::fabs(a); }},
      {"Exp", [](double a, double) { return std::exp(a); }},
      {"Reciprocal", [](double a, double) { return 1 / a; }},
      {"Copy", [](double a, double) { return a; }},
      {"Identity", [](double a, double) { return a; }},
      {"negate", [](double a, double) { return -a; }},
  };
  auto entry = once.find(take_apart(name).base);
  return entry == once.end() ? nullptr : entry->second;
}

double lerp(double a, double b, double weight) {
  return weight < 0.5 ? a + weight * (b - a) : b - (b - a) * (1 - weight);
}

using OfPiece = std::function<double(const Piece&, const double* values)>;

// Reads the lists' elements as doubles, computes, and writes to one list.
Work over(Pieces pieces, std::vector<Type> types, int target, int inputs, OfPiece compute) {
  return [=](Writes& writes) {
    for (const Piece& piece : pieces.all) {
      size_t width = width_of(types[target]);
      std::vector<char> bytes(piece.count * width);
      double values[5];
      for (int64_t i = 0; i < piece.count; i++) {
        for (int k = 0; k < inputs; k++)
          values[k] = load(types[k], piece.lists[k] + i * static_cast<int64_t>(width_of(types[k])));
        store(types[target], bytes.data() + i * width, compute(piece, values));
      }
      writes.put(piece.lists[target], bytes.data(), bytes.size());
    }
  };
}

struct Apply {
  const Launch& launch;
  std::string functor;
  std::vector<std::string> given;  // arguments of the functor's template
  Type type;
  int depth;
  Form form;

  std::string operation() const { return launch.parts.arguments.size() > 2 ? launch.parts.arguments[2] : ""; }
  Pieces all() const {
    return pieces(static_cast<const char*>(launch.arguments[0]), depth, form, type, wide(type), launch.grid.x);
  }
  std::vector<Type> types() const { return std::vector<Type>(5, type); }
  int target() const { return given.size() > 3 ? atoi(given[3].c_str()) : 0; }
  double number(int index) const { return load(wide(type), launch.arguments[index]); }
};

// Takes the scale off gradients, and notes whether one was not finite. The operation holds where to, and the factor.
Work unscale(const Apply& apply) {
  auto* operation = static_cast<const char*>(apply.launch.arguments[2]);
  char *found = read<char*>(operation), *factor = read<char*>(operation + sizeof(char*));
  Pieces all = apply.all();
  Type type = apply.type;
  auto overflowed = std::make_shared<bool>(false);
  Work scale = over(all, apply.types(), apply.target(), 1, [=](const Piece&, const double* v) {
    if (!std::isfinite(v[0])) *overflowed = true;
    return v[0] * load(wide(type), factor);
  });
  return [=](Writes& writes) {
    *overflowed = false;
    scale(writes);
    if (*overflowed) writes.put(found, Type::float32, 1);
  };
}

// The scale of GradScaler: the scale, how many steps went well, what was found, factors, and how many steps it takes.
Work update_scale(const Launch& launch) {
  char *scale = launch.address(0), *steps = launch.address(1), *found = launch.address(2);
  double growth = launch.argument<double>(3), backoff = launch.argument<double>(4);
  int interval = launch.argument<int>(5);
  return [=](Writes& writes) {
    bool overflowed = load(Type::float32, found) != 0;
    int well = overflowed ? 0 : read<int>(steps) + 1;
    double factor = overflowed ? backoff : well == interval ? growth : 1;
    writes.put(scale, Type::float32, load(Type::float32, scale) * factor);
    writes.put(steps, Type::int32, well == interval ? 0 : well);
  };
}

Work with_operation(const Apply& apply) {
  if (apply.operation().find("amp_foreach_non_finite_check_and_unscale") != std::string::npos) return unscale(apply);
  Pair pair = pair_named(apply.operation());
  const std::string& name = apply.functor;
  if (name == "TernaryOpScalarFunctor" || name == "TernaryOpScalarListFunctor" || name == "TernaryOpListFunctor") {
    if (take_apart(apply.operation()).base != "LerpFunctor") return {};
    if (name == "TernaryOpListFunctor")
      return over(apply.all(), apply.types(), apply.target(), 3,
                  [](const Piece&, const double* v) { return lerp(v[0], v[1], v[2]); });
    double weight = name == "TernaryOpScalarFunctor" ? apply.number(3) : 0;
    bool listed = name == "TernaryOpScalarListFunctor";
    return over(apply.all(), apply.types(), apply.target(), 2, [=](const Piece& piece, const double* v) {
      return lerp(v[0], v[1], listed ? piece.number : weight);
    });
  }
  if (!pair) return {};
  if (name == "UnaryOpFunctor")
    return over(apply.all(), apply.types(), apply.target(), 1,
                [=](const Piece&, const double* v) { return pair(v[0], 0); });
  if (name == "BinaryOpScalarFunctor") {
    double number = apply.number(3);
    return over(apply.all(), apply.types(), apply.target(), 1,
                [=](const Piece&, const double* v) { return pair(v[0], number); });
  }
  if (name == "BinaryOpScalarListFunctor")
    return over(apply.all(), apply.types(), apply.target(), 1,
                [=](const Piece& piece, const double* v) { return pair(v[0], piece.number); });
  if (name == "BinaryOpScalarTensorFunctor") {
    auto* other = apply.launch.address(3);
    double alpha = apply.number(4);
    Type type = apply.type;
    return over(apply.all(), apply.types(), apply.target(), 1,
                [=](const Piece&, const double* v) { return pair(v[0], alpha * load(type, other)); });
  }
  if (name == "BinaryOpListAlphaFunctor") {
    double alpha = apply.number(3);
    return over(apply.all(), apply.types(), apply.target(), 2,
                [=](const Piece&, const double* v) { return pair(v[0], alpha * v[1]); });
  }
  if (name == "PointwiseOpScalarFunctor") {
    double number = apply.number(3);
    return over(apply.all(), apply.types(), apply.target(), 3,
                [=](const Piece&, const double* v) { return v[0] + number * pair(v[1], v[2]); });
  }
  if (name == "PointwiseOpScalarListFunctor")
    return over(apply.all(), apply.types(), apply.target(), 3,
                [=](const Piece& piece, const double* v) { return v[0] + piece.number * pair(v[1], v[2]); });
  if (name == "PointwiseOpListFunctor")
    return over(apply.all(), apply.types(), 2, 2, [=](const Piece&, const double* v) { return pair(v[0], v[1]); });
  return {};
}

Work copies(const Apply& apply) {
  auto from = apply.given.size() > 1 ? type_named(apply.given[1]) : std::nullopt;
  if (!from) return {};
  // From the second list's type to the first's, which is that of the target.
  Pieces found = apply.all();
  Type to = apply.type;
  // Addresses were moved on by the width of one type alone.
  for (Piece& piece : found.all) {
    int64_t begun = piece.chunk_index * chunk;
    piece.lists[0] += begun * (static_cast<int64_t>(width_of(*from)) - static_cast<int64_t>(width_of(to)));
  }
  return over(found, {*from, to}, 1, 1, [](const Piece&, const double* v) { return v[0]; });
}

// The sum of squares of each piece; lpnorm_cleanup takes their roots.
Work norms(const Apply& apply) {
  if (apply.given.size() < 2 || apply.given[1] != "(NormType)2") return {};
  auto* to = apply.launch.address(2);
  int most_chunks = apply.launch.argument<int>(3);
  Pieces found = apply.all();
  Type type = apply.type, result = wide(type);
  return [=](Writes& writes) {
    for (const Piece& piece : found.all) {
      double all = 0;
      for (int64_t i = 0; i < piece.count; i++) {
        double value = load(type, piece.lists[0] + i * static_cast<int64_t>(width_of(type)));
        all += value * value;
      }
      int64_t at = static_cast<int64_t>(found.first_tensor + piece.tensor) * most_chunks + piece.chunk_index;
      writes.put(to + at * static_cast<int64_t>(width_of(result)), result, all);
    }
  };
}

Work fused_sgd(const Apply& apply) {
  const Launch& launch = apply.launch;
  Pieces found = apply.all();
  Type type = apply.type;
  int depth = apply.depth;
  return [=, decay = launch.argument<double>(2), momentum = launch.argument<double>(3),
          rate_at = launch.argument<const float*>(4), given_rate = launch.argument<double>(5),
          dampening = launch.argument<double>(6), nesterov = launch.argument<bool>(7),
          maximize = launch.argument<bool>(8), first = launch.argument<bool>(9),
          scale = launch.argument<const float*>(10), overflow = launch.argument<const float*>(11)](Writes& writes) {
    if (overflow && *overflow == 1) return;
    double rate = rate_at ? *rate_at : given_rate;
    auto width = static_cast<int64_t>(width_of(type));
    for (const Piece& piece : found.all) {
      std::vector<char> bytes[3];
      for (auto& one : bytes) one.resize(piece.count * width);
      for (int64_t i = 0; i < piece.count; i++) {
        auto p = static_cast<float>(load(type, piece.lists[0] + i * width));
        auto g = static_cast<float>(load(type, piece.lists[1] + i * width));
        if (scale) {
          g = static_cast<float>(g / static_cast<double>(*scale));
          store(type, bytes[1].data() + i * width, g);
        }
        if (decay != 0) g = static_cast<float>(g + decay * p);
        if (depth > 2) {
          double before = load(type, piece.lists[2] + i * width);
          auto kept = first ? g : static_cast<float>(momentum * before + (1 - dampening) * g);
          store(type, bytes[2].data() + i * width, kept);
          g = nesterov ? static_cast<float>(g + momentum * kept) : kept;
        }
        p = static_cast<float>(maximize ? p + rate * g : p - rate * g);
        store(type, bytes[0].data() + i * width, p);
      }
      for (int list = 0; list < depth; list++)
        if (list != 1 || scale) writes.put(piece.lists[list], bytes[list].data(), bytes[list].size());
    }
  };
}

struct Adam {
  const float* rate_at;
  double rate, beta1, beta2, decay, epsilon;
  bool maximize;
  const float *scale, *overflow;
  bool decoupled;
};

void fused_adam_piece(const Adam& adam, const Piece& piece, Type type, Writes& writes) {
  auto width = static_cast<int64_t>(width_of(type));
  float rate = adam.rate_at ? *adam.rate_at : static_cast<float>(adam.rate);
  auto beta1 = static_cast<float>(adam.beta1), beta2 = static_cast<float>(adam.beta2);
  auto decay = static_cast<float>(adam.decay), epsilon = static_cast<float>(adam.epsilon);
  float steps = *reinterpret_cast<const float*>(piece.steps);
  float correction1 = 1 - std::pow(beta1, steps), correction2 = std::sqrt(1 - std::pow(beta2, steps));
  std::vector<char> bytes[4];
  for (auto& one : bytes) one.resize(piece.count * width);
  for (int64_t i = 0; i < piece.count; i++) {
    float v[4];
    for (int k = 0; k < 4; k++) v[k] = static_cast<float>(load(type, piece.lists[k] + i * width));
    if (adam.scale) v[1] /= *adam.scale;
    float gradient = adam.maximize ? -v[1] : v[1];
    if (decay != 0) {
      if (adam.decoupled) v[0] -= rate * decay * v[0];
      else gradient += v[0] * decay;
    }
    float square = gradient * gradient;
    v[2] = std::fma(beta1, v[2], std::fma(-beta1, gradient, gradient));
    v[3] = std::fma(beta2, v[3], std::fma(-beta2, square, square));
    v[0] -= rate / correction1 * v[2] / (std::sqrt(v[3]) / correction2 + epsilon);
    for (int k = 0; k < 4; k++) store(type, bytes[k].data() + i * width, v[k]);
  }
  for (int k = 0; k < 4; k++)
    if (k != 1 || adam.scale) writes.put(piece.lists[k], bytes[k].data(), bytes[k].size());
}

Work fused_adam(const Apply& apply) {
  // Without the greatest of the second moments.
  if (apply.depth != 4 || apply.given.size() < 4 || apply.type == Type::float64) return {};
  const Launch& launch = apply.launch;
  Adam adam{launch.argument<const float*>(2), launch.argument<double>(3),       launch.argument<double>(4),
            launch.argument<double>(5),       launch.argument<double>(6),       launch.argument<double>(7),
            launch.argument<bool>(8),         launch.argument<const float*>(9), launch.argument<const float*>(10),
            apply.given[2] == "(ADAM_MODE)1"};
  Pieces found = apply.all();
  Type type = apply.type;
  return [=](Writes& writes) {
    if (adam.overflow && *adam.overflow == 1) return;
    for (const Piece& piece : found.all) fused_adam_piece(adam, piece, type, writes);
  };
}

// The norm of each tensor, of the sums of its pieces: source, addresses of the results, pieces of a tensor.
Work norms_of_tensors(const Launch& launch) {
  auto type = type_named(launch.parts.arguments[2]), sums = type_named(launch.parts.arguments.back());
  if (!type || !sums || launch.parts.arguments[1] != "(NormType)2") return {};
  char* from = launch.address(0);
  auto* addresses = static_cast<char**>(launch.arguments[1]);
  std::vector<char*> to(addresses, addresses + launch.grid.x);
  int chunks = launch.argument<int>(2);
  return [=](Writes& writes) {
    auto width = static_cast<int64_t>(width_of(*sums));
    for (size_t tensor = 0; tensor < to.size(); tensor++) {
      double all = 0;
      for (int i = 0; i < chunks; i++) all += load(*sums, from + (static_cast<int64_t>(tensor) * chunks + i) * width);
      writes.put(to[tensor], *type, std::sqrt(all));
    }
  };
}

}  // namespace

Work many_tensors(const Launch& launch) {
  if (launch.parts.base == "lpnorm_cleanup") return norms_of_tensors(launch);
  if (launch.parts.base == "amp_update_scale_cuda_kernel") return update_scale(launch);
  if (launch.parts.base != "multi_tensor_apply_kernel") return {};
  Template meta = take_apart(launch.parts.arguments[0]), functor = take_apart(launch.parts.arguments[1]);
  auto type = functor.arguments.empty() ? std::nullopt : type_named(functor.arguments[0]);
  if (!type) return {};
  Form form = meta.base == "TensorListMetadata"             ? Form::plain
              : meta.base == "TensorListScalarListMetadata" ? Form::numbers
                                                            : Form::steps;
  int depth = atoi(meta.arguments.back().c_str());
  Apply apply{launch, functor.base, functor.arguments, *type, depth, form};
  if (functor.base == "ZeroFunctor")
    return over(apply.all(), apply.types(), 0, 0, [](const Piece&, const double*) { return 0.0; });
  if (functor.base == "CopyFunctor") return copies(apply);
  if (functor.base == "LpNormFunctor") return norms(apply);
  if (functor.base == "FusedSgdMathFunctor") return fused_sgd(apply);
  if (functor.base == "FusedAdamMathFunctor") return fused_adam(apply);
  return with_operation(apply);
}

}  // namespace compute
