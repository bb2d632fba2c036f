#include "communicator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "../core/settings.h"

namespace nccl {
namespace {

constexpr int64_t patience_ns = 300'000'000'000;
// A rank whose promise has stood still for so long is stopped or dead, and holds up nobody's other streams.
constexpr int64_t stopped_ns = 3'000'000'000;

[[noreturn]] void give_up(const std::string& what) {
  perror(("[simulated NCCL] " + what).c_str());
  abort();
}

char* map_file(const std::string& path, size_t size, bool write) {
  int file = open(path.c_str(), write ? O_RDWR | O_CREAT : O_RDONLY, 0600);
  if (file < 0) give_up(path);
  struct stat found;
  fstat(file, &found);
  // It may only grow: others have it mapped.
  if (write && static_cast<size_t>(found.st_size) < size && ftruncate(file, static_cast<off_t>(size))) give_up(path);
  void* address = mmap(nullptr, size, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (address == MAP_FAILED) give_up(path);
  return static_cast<char*>(address);
}

bool wait_for(const std::function<bool()>& done) {
  int64_t until = simulation::now() + patience_ns;
  while (!done()) {
    if (simulation::now() > until) return false;
    usleep(300);
  }
  return true;
}

}  // namespace

Board::Board(const std::string& folder, int ranks) : ranks_(ranks) {
  size_t members = ranks * sizeof(Member), splits = ranks * slots * sizeof(SplitChoice);
  size_t arrivals = ranks * slots * sizeof(Arrival), pairs = 2 * ranks * ranks * messages * sizeof(Arrival);
  // A new file is all zeros, which is what an empty board looks like. Every rank maps the same one.
  char* at = map_file(folder + "/board", members + splits + arrivals + pairs, true);
  arrivals_ = reinterpret_cast<Arrival*>(at);
  messages_ = reinterpret_cast<Arrival*>(at + arrivals);
  splits_ = reinterpret_cast<SplitChoice*>(at + arrivals + pairs);
  members_ = reinterpret_cast<Member*>(at + arrivals + pairs + splits);
}

void SharedData::map(size_t size, bool write) {
  if (size <= size_) return;
  if (address_) munmap(address_, size_);
  address_ = map_file(file_, size, write);
  size_ = size;
}

char* SharedData::writable(size_t size) {
  map(size, true);
  return address_;
}

const char* SharedData::readable(size_t size) {
  map(size, false);
  return address_;
}

Peer::Peer(int process, int global_rank) : global_rank_(global_rank) {
  shared_ =
      reinterpret_cast<std::atomic<int64_t>*>(map_file(simulation::horizon_file(process), sizeof *shared_, false));
}

int64_t Peer::horizon() {
  int64_t present = simulation::now();  // before the promise is read, see Simulation::push
  int64_t promised = shared_->load();
  if (promised != seen_) {
    seen_ = promised;
    seen_at_ = present;
  }
  if (promised < present && present - seen_at_ > stopped_ns) return INT64_MAX;
  return std::min(promised, present);
}

Communicator::Communicator(std::string in, int rank, int size)
    : folder((mkdir(in.c_str(), 0700), std::move(in))), rank(rank), size(size), board(folder, size) {
  for (int owner = 0; owner < size; owner++) {
    for (const char* turn : {"-0", "-1"}) data_.emplace_back(folder + "/data-" + std::to_string(owner) + turn);
  }
}

bool Communicator::meet() {
  simulation::share_horizon();
  board.member(rank).global_rank = simulation::rank_of_process();
  board.member(rank).process = getpid();
  for (int other = 0; other < size; other++) {
    Member& member = board.member(other);
    if (!wait_for([&] { return member.process != 0; })) {
      fprintf(stderr, "[simulated NCCL] rank %d waited in vain for rank %d\n", rank, other);
      return false;
    }
    peers.emplace_back(member.process, member.global_rank);
  }
  return true;
}

bool Communicator::split(int color, int key, Communicator** made) {
  uint64_t number = splits_++;
  SplitChoice& own = board.split(rank, number);
  own.color = color;
  own.key = key;
  own.number = number + 1;
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int other = 0; other < size; other++) {
    SplitChoice& choice = board.split(other, number);
    if (!wait_for([&] { return choice.number == number + 1; })) return false;
    if (choice.color == color) members.emplace_back(choice.key, other);
  }
  *made = nullptr;
  if (color == no_color) return true;
  std::sort(members.begin(), members.end());
  auto place = std::find(members.begin(), members.end(), std::pair(key, rank)) - members.begin();
  std::string name = folder + "-" + std::to_string(number) + "-" + std::to_string(color);
  *made = new Communicator(name, static_cast<int>(place), static_cast<int>(members.size()));
  return (*made)->meet();
}

double Communicator::link_bandwidth(int peer) const {
  const simulation::Settings& settings = simulation::settings();
  int here = peers[rank].global_rank(), there = peers[peer].global_rank();
  auto ends = std::minmax({here, there});
  auto slow = std::minmax({settings.slow_link[0], settings.slow_link[1]});
  return settings.link_bytes_per_ns * (ends == slow ? settings.slow_link_factor : 1);
}

// All ranks send at the pace of the slowest link between neighbours.
double Communicator::ring_bandwidth() const {
  const simulation::Settings& settings = simulation::settings();
  auto slow = std::minmax({settings.slow_link[0], settings.slow_link[1]});
  for (int one = 0; one < size; one++) {
    auto ends = std::minmax({peers[one].global_rank(), peers[(one + 1) % size].global_rank()});
    if (ends == slow) return settings.link_bytes_per_ns * settings.slow_link_factor;
  }
  return settings.link_bytes_per_ns;
}

}  // namespace nccl
