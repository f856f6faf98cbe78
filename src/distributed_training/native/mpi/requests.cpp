#include "requests.h"

#include <algorithm>

namespace dtrain {

void Requests::send(MPI_Comm comm, int peer, int tag, const void* data, size_t bytes, size_t cut) {
  auto at = static_cast<const uint8_t*>(data);
  do {
    size_t now = std::min(bytes, cut);
    peers_.push_back(peer);
    requests_.push_back(MPI_REQUEST_NULL);
    check_mpi(MPI_Isend(at, static_cast<int>(now), MPI_BYTE, peer, tag, comm, &requests_.back()), "MPI_Isend");
    at += now;
    bytes -= now;
  } while (bytes > 0);
}

void Requests::receive(MPI_Comm comm, int peer, int tag, void* data, size_t bytes, size_t cut) {
  auto at = static_cast<uint8_t*>(data);
  do {
    size_t now = std::min(bytes, cut);
    peers_.push_back(peer);
    requests_.push_back(MPI_REQUEST_NULL);
    check_mpi(MPI_Irecv(at, static_cast<int>(now), MPI_BYTE, peer, tag, comm, &requests_.back()), "MPI_Irecv");
    at += now;
    bytes -= now;
  } while (bytes > 0);
}

bool Requests::test() {
  if (requests_.empty()) return true;
  int done = 0;
  statuses_.resize(requests_.size());
  int code = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, statuses_.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (const auto& status : statuses_) {
      if (status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING) {
        throw MpiError(status.MPI_ERROR, "a message from or to group rank " + std::to_string(status.MPI_SOURCE));
      }
    }
  }
  check_mpi(code, "MPI_Testall");
  if (!done) return false;
  last_ = statuses_.back();
  requests_.clear();
  peers_.clear();
  return true;
}

std::vector<int> Requests::open() const {
  std::vector<int> open;
  for (size_t i = 0; i < requests_.size(); ++i) {
    int done = 1;
    if (requests_[i] != MPI_REQUEST_NULL) MPI_Request_get_status(requests_[i], &done, MPI_STATUS_IGNORE);
    if (!done && std::find(open.begin(), open.end(), peers_[i]) == open.end()) open.push_back(peers_[i]);
  }
  std::sort(open.begin(), open.end());
  return open;
}

}  // namespace dtrain
