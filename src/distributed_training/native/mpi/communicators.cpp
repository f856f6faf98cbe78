#include "communicators.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "engine.h"

namespace dtrain {

namespace {

/// What a rank tells about a group that has ended there.
struct Ended {
  uint64_t id;
  int64_t sent, received;
};

bool is_among(const std::vector<int>& some, const std::vector<int>& members) {
  return std::all_of(some.begin(), some.end(), [&](int rank) {
    return std::find(members.begin(), members.end(), rank) != members.end();
  });
}

/// What all members of `comm` tell.
std::vector<Ended> told_by_all(const std::vector<Ended>& own, MPI_Comm comm, int size) {
  const int bytes = static_cast<int>(own.size() * sizeof(Ended));
  std::vector<int> lengths(size), places(size, 0);
  check_mpi(MPI_Allgather(&bytes, 1, MPI_INT, lengths.data(), 1, MPI_INT, comm), "MPI_Allgather");
  std::partial_sum(lengths.begin(), lengths.end() - 1, places.begin() + 1);
  std::vector<Ended> all((places.back() + lengths.back()) / sizeof(Ended));
  if (all.empty()) return all;
  check_mpi(MPI_Allgatherv(own.data(), bytes, MPI_BYTE, all.data(), lengths.data(), places.data(), MPI_BYTE, comm),
            "MPI_Allgatherv");
  return all;
}

}  // namespace

int Communicators::count() const {
  return (everybody != MPI_COMM_NULL) + (transfers != MPI_COMM_NULL) + (leaders != MPI_COMM_NULL);
}

void PutBy::add(Communicators communicators) {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_.push_back(std::move(communicators));
}

int PutBy::free_agreed(MPI_Comm comm, const std::vector<int>& members) {
  std::vector<Communicators> here;
  std::vector<Ended> own;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& one : waiting_) {
      if (is_among(one.members, members)) here.push_back(one);
    }
  }
  std::sort(here.begin(), here.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  for (const auto& one : here) own.push_back({one.id, one.sent, one.received});
  struct Sum {
    size_t ranks = 0;
    int64_t on_the_way = 0;
  };
  std::map<uint64_t, Sum> sums;
  for (const auto& told : told_by_all(own, comm, static_cast<int>(members.size()))) {
    auto& sum = sums[told.id];
    ++sum.ranks;
    sum.on_the_way += told.sent - told.received;
  }
  int freed = 0;
  for (auto& one : here) {
    // What was sent and never received may still arrive: its communicator must not be used again for another group.
    if (sums[one.id].ranks != one.members.size() || sums[one.id].on_the_way != 0) continue;
    freed += one.count();
    for (MPI_Comm* each : {&one.leaders, &one.transfers, &one.everybody}) {
      if (*each != MPI_COMM_NULL) check_mpi(MPI_Comm_free(each), "MPI_Comm_free");
    }
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.erase(
        std::remove_if(waiting_.begin(), waiting_.end(), [&](const auto& other) { return other.id == one.id; }),
        waiting_.end());
  }
  return freed;
}

}  // namespace dtrain
