#include "notices.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "engine.h"

namespace dtrain {

namespace {

constexpr int kTag = 1;

}  // namespace

void Notices::open(MPI_Comm world) {
  check_mpi(MPI_Comm_dup(world, &comm_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  receive();
}

void Notices::receive() {
  check_mpi(MPI_Irecv(&incoming_, sizeof(Notice), MPI_BYTE, MPI_ANY_SOURCE, kTag, comm_, &request_), "MPI_Irecv");
}

void Notices::close() {
  if (request_ != MPI_REQUEST_NULL) {
    MPI_Cancel(&request_);
    MPI_Request_free(&request_);
  }
  forget_sent();
  for (auto& one : sent_) {
    MPI_Request_free(&one.request);
    one.notice.release();  // still to be sent by MPI
  }
  sent_.clear();
}

void Notices::add(uint64_t group, std::weak_ptr<Listener> listener) {
  for (auto at = listeners_.begin(); at != listeners_.end();) at = at->second.expired() ? listeners_.erase(at) : ++at;
  listeners_[group] = std::move(listener);
}

void Notices::send(int world_rank, const Notice& notice) {
  if (comm_ == MPI_COMM_NULL) return;
  auto copy = std::make_unique<Notice>(notice);
  copy->text[Notice::kText - 1] = 0;
  const size_t bytes = offsetof(Notice, text) + std::strlen(copy->text) + 1;
  MPI_Request request;
  if (MPI_Isend(copy.get(), static_cast<int>(bytes), MPI_BYTE, world_rank, kTag, comm_, &request) == MPI_SUCCESS) {
    sent_.push_back({request, std::move(copy)});
  }
}

void Notices::forget_sent() {
  sent_.erase(std::remove_if(sent_.begin(), sent_.end(),
                             [](Sent& one) {
                               int done = 0;
                               return MPI_Test(&one.request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done;
                             }),
              sent_.end());
}

void Notices::settle(std::chrono::milliseconds longest) {
  const auto end = Clock::now() + longest;
  Backoff backoff;
  for (forget_sent(); !sent_.empty() && Clock::now() < end; forget_sent()) backoff.pause();
}

void Notices::poll() {
  if (!sent_.empty()) forget_sent();
  while (request_ != MPI_REQUEST_NULL) {
    int done = 0;
    if (MPI_Test(&request_, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || !done) return;
    const Notice notice = incoming_;
    incoming_ = Notice();
    try {
      receive();
    } catch (const MpiError&) {  // a connection is lost: whoever waits for it learns that from his own messages
      request_ = MPI_REQUEST_NULL;
    }
    auto found = listeners_.find(notice.group);
    auto listener = found == listeners_.end() ? nullptr : found->second.lock();
    if (listener) listener->hear(notice);
  }
}

}  // namespace dtrain
