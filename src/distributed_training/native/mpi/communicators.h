// The communicators of a group, and their end.
//
// To free a communicator is collective in MPI, but a group ends on each rank when Python lets go of it there, at no moment
// that the ranks agree on, and some ranks may be in it still. So the communicators of a group that has ended here are
// put by, and freed when its members meet anyway: in making another group that has them all. There they tell each other
// what they have put by; what all members of a group have put by is freed by all of them, in the same order. Groups that
// a failure has broken never end: a message that was given up may still be on its way in them.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace dtrain {

struct Communicators {
  uint64_t id = 0;           // of the group
  std::vector<int> members;  // their ranks in the job
  MPI_Comm everybody = MPI_COMM_NULL;
  MPI_Comm transfers = MPI_COMM_NULL;
  MPI_Comm leaders = MPI_COMM_NULL;     // on those who speak for a host, else null
  int64_t sent = 0, received = 0;       // tensors, over `transfers`
  /// How many there are.
  int count() const;
};

/// Those of groups that have ended on this rank.
class PutBy {
 public:
  /// Any thread.
  void add(Communicators communicators);
  /// Frees what all have put by. Called by all of `members` (ranks in the job), whose communicator `comm` is.
  /// Gives the number of communicators that were freed.
  int free_agreed(MPI_Comm comm, const std::vector<int>& members);

 private:
  std::mutex mutex_;
  std::vector<Communicators> waiting_;
};

}  // namespace dtrain
