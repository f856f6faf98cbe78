// What ranks tell each other beside their collectives: that a group is broken, and what a rank that has waited for a
// while is in.
//
// One receive serves all groups of a process, on a communicator of its own: the communicators of a group then carry
// nothing but its operations, and may be freed when these are done (communicators.h). All methods belong to whoever has
// MPI (engine.h).
#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "calls.h"

namespace dtrain {

struct Notice {
  enum Kind : uint32_t { failed, waits };
  static constexpr size_t kText = 1024;
  uint64_t group = 0;  // the number that all members know it by
  Kind kind = failed;
  int32_t rank = 0;       // in the group, of the one who tells
  Call call;              // `waits`: what it is in
  char text[kText] = {};  // `failed`: why
};

/// A group, as far as it is told something.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void hear(const Notice& notice) = 0;
};

class Notices {
 public:
  /// Begins to listen, over all ranks of the job.
  void open(MPI_Comm world);
  /// Before MPI ends in good order.
  void close();
  /// Notices of this group go to `listener` as long as it lives. Others are dropped: their group has ended.
  void add(uint64_t group, std::weak_ptr<Listener> listener);
  /// Never waits for anything; what cannot be sent is not sent.
  void send(int world_rank, const Notice& notice);
  /// Hands on what has come. Never throws.
  void poll();
  /// Goes on until all is sent, but not for longer than this: to a rank that was not spoken to before the connection
  /// has to be made first.
  void settle(std::chrono::milliseconds longest);

 private:
  struct Sent {
    MPI_Request request;
    std::unique_ptr<Notice> notice;
  };
  void receive();
  void forget_sent();

  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Request request_ = MPI_REQUEST_NULL;
  Notice incoming_;
  std::vector<Sent> sent_;
  std::map<uint64_t, std::weak_ptr<Listener>> listeners_;
};

}  // namespace dtrain
