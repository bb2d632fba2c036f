#include "products.h"

#include <cstdio>
#include <mutex>
#include <set>

namespace compute {
namespace {

// A matrix's rows one after another, as doubles: of A, or of B transposed.
std::vector<double> rows(const Matrix& matrix, int64_t batch, int64_t count, int64_t length, bool along_columns) {
  std::vector<double> found(count * length);
  auto width = static_cast<int64_t>(width_of(matrix.type));
  const char* from = matrix.at + batch * matrix.batch * width;
  for (int64_t row = 0; row < count; row++) {
    int64_t first = along_columns ? row * matrix.column : row, step = along_columns ? 1 : matrix.column;
    load_many(matrix.type, from + first * width, step * width, static_cast<int>(length), &found[row * length]);
  }
  return found;
}

void multiply(const Product& given, Writes& writes) {
  auto width = static_cast<int64_t>(width_of(given.to.type));
  std::vector<char> bytes(given.m * width);
  for (int64_t batch = 0; batch < given.batches; batch++) {
    std::vector<double> a = rows(given.a, batch, given.m, given.k, given.a.transposed);
    std::vector<double> b = rows(given.b, batch, given.n, given.k, !given.b.transposed);
    auto c_width = static_cast<int64_t>(width_of(given.c.type));
    for (int64_t column = 0; column < given.n; column++) {
      for (int64_t row = 0; row < given.m; row++) {
        const double *left = &a[row * given.k], *right = &b[column * given.k];
        double sum = 0;
        for (int64_t i = 0; i < given.k; i++) sum += left[i] * right[i];
        sum *= given.alpha;
        if (given.beta != 0) {
          int64_t place = batch * given.c.batch + column * given.c.column + row;
          sum += given.beta * load(given.c.type, given.c.at + place * c_width);
        }
        if (given.bias)
          sum += load(given.bias_type, given.bias + row * static_cast<int64_t>(width_of(given.bias_type)));
        store(given.to.type, bytes.data() + row * width, given.finish ? given.finish(sum) : sum);
      }
      writes.put(given.to.at + (batch * given.to.batch + column * given.to.column) * width, bytes.data(), bytes.size());
    }
  }
}

}  // namespace

Work product(const Product& given) {
  return [given](Writes& writes) { multiply(given, writes); };
}

void attach(simulation::Task& task, Work work) {
  struct State {
    Work work;
    Writes writes;
    uint64_t changes = 0;
  };
  task.renew = [work](simulation::Task& launched, void*) { attach(launched, work); };
  auto state = std::make_shared<State>(State{std::move(work), {}});
  task.at_begin = [state] {
    state->work(state->writes);
    state->writes.spoil();
    state->changes = changes();
  };
  task.effect = [state] {
    // Who writes meanwhile to what it reads or writes was to wait for it: its results stay spoiled.
    if (state->changes == changes() || state->writes.would_repeat(state->work)) state->writes.apply();
  };
}

void refuse(const std::string& name) {
  static std::mutex& lock = *new std::mutex;
  static auto& told = *new std::set<std::string>;
  std::lock_guard<std::mutex> held(lock);
  if (told.insert(name).second) fprintf(stderr, "[simulated GPU] cannot compute %s\n", name.c_str());
}

}  // namespace compute
