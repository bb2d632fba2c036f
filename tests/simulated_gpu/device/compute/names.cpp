#include "names.h"

#include <cstdlib>
#include <cstring>

#include "../core/simulation.h"

namespace compute {
namespace {

int depth_change(char c) { return strchr("<([{", c) ? 1 : strchr(">)]}", c) ? -1 : 0; }

void remove_all(std::string& text, const std::string& part) {
  for (size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, part.size());
}

std::string trimmed(const std::string& text) {
  size_t first = text.find_first_not_of(' '), last = text.find_last_not_of(' ');
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

// Where the bracket that opens at `open` closes.
size_t closing(const std::string& text, size_t open) {
  int depth = 0;
  for (size_t i = open; i < text.size(); i++) {
    if (!text[i]) break;
    depth += depth_change(text[i]);
    if (depth == 0) return i;
  }
  return text.size();
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  int depth = 0;
  size_t from = 0;
  for (size_t i = 0; i < text.size(); i++) {
    depth += depth_change(text[i]);
    if (depth || text[i] != ',') continue;
    parts.push_back(trimmed(text.substr(from, i - from)));
    from = i + 1;
  }
  std::string last = trimmed(text.substr(from));
  if (!last.empty()) parts.push_back(last);
  return parts;
}

std::string last_component(const std::string& name) {
  size_t at = name.rfind("::");
  return trimmed(at == std::string::npos ? name : name.substr(at + 2));
}

}  // namespace

std::string plain_name(const std::string& mangled) {
  std::string name = simulation::demangled(mangled);
  if (!name.compare(0, 5, "void ")) name.erase(0, 5);
  for (const char* part : {"(anonymous namespace)::", "at::native::", "c10::"}) remove_all(name, part);
  return name;
}

Template take_apart(const std::string& name) {
  size_t open = name.find_first_of("<(");
  if (open == std::string::npos) return {last_component(name), {}};
  Template found{last_component(name.substr(0, open)), {}};
  if (name[open] == '<') found.arguments = split(name.substr(open + 1, closing(name, open) - open - 1));
  return found;
}

std::vector<std::string> arguments_of(const std::string& base, const std::string& name) {
  size_t at = name.find(base + "<");
  if (at == std::string::npos) return {};
  size_t open = at + base.size();
  return split(name.substr(open + 1, closing(name, open) - open - 1));
}

bool is_lambda(const std::string& name) { return name.find("::{lambda(") != std::string::npos; }

Lambda lambda(const std::string& name) {
  Lambda found;
  found.function = take_apart(name).base;
  constexpr size_t head = 7;  // of "{lambda"
  size_t first = name.find("{lambda("), last = name.rfind("{lambda(");
  auto number_after = [&](size_t at) { return atoi(name.c_str() + closing(name, at + head) + 2); };
  found.first_number = number_after(first);
  found.number = number_after(last);
  size_t close = closing(name, last + head);
  found.parameters = split(name.substr(last + head + 1, close - last - head - 1));
  return found;
}

}  // namespace compute
