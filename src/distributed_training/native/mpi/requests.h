// Sends and receives of MPI that are waited for together.
#pragma once

#include <cstddef>
#include <vector>

#include "engine.h"

namespace dtrain {

// One MPI call takes an int; messages of 2^30 bytes stay clear of its end.
constexpr size_t kMessage = size_t{1} << 30;

/// Sends and receives that are waited for together.
class Requests {
 public:
  /// In messages of `cut` bytes; the receiver must cut as the sender does.
  void send(MPI_Comm comm, int peer, int tag, const void* data, size_t bytes, size_t cut = kMessage);
  void receive(MPI_Comm comm, int peer, int tag, void* data, size_t bytes, size_t cut = kMessage);
  bool empty() const { return requests_.empty(); }
  /// True when all are done (and forgets them). Throws MpiError.
  bool test();
  /// The peers of those that are not done.
  std::vector<int> open() const;
  /// Bytes of the last receive that test() has seen complete and who sent it.
  const MPI_Status& last() const { return last_; }

 private:
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::vector<int> peers_;
  MPI_Status last_{};
};

}  // namespace dtrain
