// What goes wrong in a group: how its ranks learn of it, and by when.
#include <cstring>

#include "group.h"
#include "host_memory.h"

namespace dtrain {

namespace {

/// The rank nearest to a trouble gives up first, so that the reason that spreads is the right one: ranks that wait for
/// another host, and then those that wait for the one that waits, are given a little longer.
constexpr std::chrono::milliseconds kGrace{1500};
/// A rank that has waited for so long in a collective tells the others what it is in.
constexpr std::chrono::milliseconds kTellAfter{100};
/// How long telling the others of a failure may take.
constexpr std::chrono::milliseconds kSending{200};

}  // namespace

void Group::begin(Call::Kind kind, size_t count, int root) {
  Call call;
  call.kind = kind;
  call.count = count;
  call.root = root;
  begin(call);
}

void Group::begin(Call::Kind kind, size_t count, Dtype dtype, Op op, uint8_t wire) {
  Call call;
  call.kind = kind;
  call.count = count;
  call.dtype = static_cast<uint8_t>(dtype);
  call.op = static_cast<uint8_t>(op);
  call.wire = wire;
  begin(call);
}

void Group::begin(const Call& call) {
  if (auto other = calls_.add(call)) throw Differs(explain(*other));
}

std::string Group::explain(const Calls::Other& other) const {
  return difference(std::to_string(settings_.names[other.rank]), other.theirs, std::to_string(settings_.names[rank()]),
                    other.own);
}

void Group::look() {
  Engine::instance().progress();
  if (auto call = calls_.untold(kTellAfter)) {
    Notice notice;
    notice.kind = Notice::waits;
    notice.call = *call;
    send_notices(notice);
  }
  check();
}

void Group::look_soon() {
  if (!Engine::instance().running() || look_asked_.exchange(true)) return;
  Engine::instance().submit([self = shared_from_this()] {
    self->look_asked_ = false;
    try {
      self->look();
    } catch (const Broken&) {  // the one who waits hears of it through the memory in which he waits
    }
  });
}

void Group::check() {
  Engine::instance().notices().poll();
  if (broken()) throw Broken(failure());
}

void Group::hear(const Notice& notice) {
  if (broken() || notice.rank < 0 || notice.rank >= size()) return;
  if (notice.kind == Notice::waits) {
    if (auto other = calls_.hear(notice.rank, notice.call)) fail(explain(*other));
    return;
  }
  std::string reason = "rank " + std::to_string(settings_.names[notice.rank]) + " gave up: " + notice.text;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    reason_ = reason;
    broken_ = true;
  }
  keep_for_ever();
  if (memory_) memory_->abort(reason);
}

void Group::keep_for_ever() {
  Engine::instance().mark_failed();
  new std::shared_ptr<Group>(shared_from_this());  // messages that were given up may still arrive in its buffers
}

std::string Group::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

void Group::fail(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_) return;
    reason_ = reason;
    broken_ = true;
  }
  keep_for_ever();
  if (memory_) memory_->abort(reason);
  if (size() == 1 || comms_.id == 0) return;
  Notice notice;
  std::strncpy(notice.text, reason.c_str(), Notice::kText - 1);
  if (Engine::is_this_thread()) {
    send_notices(notice);
  } else if (Engine::instance().running()) {
    Engine::instance().submit([self = shared_from_this(), notice] { self->send_notices(notice); });
  }
}

void Group::send_notices(const Notice& notice) {
  Notice own = notice;
  own.group = comms_.id;
  own.rank = rank();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) Engine::instance().notices().send(comms_.members[peer], own);
  }
  if (notice.kind == Notice::failed) Engine::instance().notices().settle(kSending);
}

void Group::run(const std::string& what, uint64_t sequence, const std::function<void()>& operation) {
  auto where = [&] {
    return what + " (number " + std::to_string(sequence) + " of group '" + name() + "') failed on rank " +
           std::to_string(settings_.names[rank()]) + ": ";
  };
  auto give_up = [&](const std::string& why) {
    fail(where() + why);
    throw Broken(where() + why);
  };
  if (broken()) throw Broken(where() + "the group is broken by an earlier failure: " + failure());
  try {
    operation();
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(where() + error.what());
  } catch (const Broken& error) {
    throw Broken(where() + error.what());
  } catch (const Late& error) {
    give_up(std::string(error.what()) + "; such a rank hangs, has died, or did not make this call");
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}

Waiting Group::waiting(Timeout timeout) const {
  const bool leads = local_[0] == rank();
  if (hosts_ > 1 && !leads) timeout += 2 * kGrace;
  auto self = const_cast<Group*>(this);
  if (Engine::is_this_thread()) return Waiting(timeout, [self] { self->look(); });
  const auto patience = Clock::now() + kTellAfter;
  Waiting waiting(timeout, [self, patience] {
    if (Clock::now() > patience) self->look_soon();
  });
  waiting.poll_every = kTellAfter;
  return waiting;
}

Clock::time_point Group::deadline(Timeout timeout, bool between_hosts) const {
  return Clock::now() + timeout + (between_hosts && leaders_ ? kGrace : Timeout(0));
}

}  // namespace dtrain
