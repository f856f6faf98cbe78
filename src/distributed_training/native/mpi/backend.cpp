#include "backend.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace dtrain {

namespace {

std::string join(const std::vector<int>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size(); ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
  return text;
}

/// Ranks of all members in MPI's world, told through the store.
std::vector<int> meet(c10d::Store& store, const GroupSettings& settings, int world_rank) {
  auto key = [](int rank) { return "mpi_rank/" + std::to_string(rank); };
  std::vector<std::string> keys;
  for (int i = 0; i < settings.size; ++i) keys.push_back(key(i));
  auto text = std::to_string(world_rank);
  store.set(key(settings.rank), std::vector<uint8_t>(text.begin(), text.end()));
  try {
    store.wait(keys, settings.timeout);
  } catch (const std::exception& error) {
    std::vector<int> missing;
    try {
      for (int i = 0; i < settings.size; ++i) {
        if (!store.check({key(i)})) missing.push_back(settings.names[i]);
      }
    } catch (const std::exception&) {
      throw std::runtime_error(std::string("the store cannot be reached: ") + error.what());
    }
    if (missing.empty()) throw;
    C10_THROW_ERROR(DistBackendError, "group '" + settings.name + "' of " + std::to_string(settings.size) +
                                          " is not complete within " + std::to_string(settings.timeout.count() / 1000) +
                                          " s: ranks " + join(missing) + " have not come");
  }
  std::vector<int> ranks;
  for (const auto& name : keys) {
    auto value = store.get(name);
    ranks.push_back(std::stoi(std::string(value.begin(), value.end())));
  }
  return ranks;
}

std::exception_ptr as_torch_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error&) {
    return error;
  } catch (const std::invalid_argument&) {
    return error;  // becomes a ValueError
  } catch (const std::exception& other) {
    try {
      C10_THROW_ERROR(DistBackendError, other.what());
    } catch (...) {
      return std::current_exception();
    }
  }
}

/// One send or receive, from its submission to its end.
class PointToPoint : public Transfer {
 public:
  PointToPoint(std::shared_ptr<Group> group, c10::intrusive_ptr<MpiWork> work, at::Tensor tensor, int peer, int tag,
               bool sends, Group::Timeout timeout, std::string what)
      : group_(std::move(group)),
        work_(std::move(work)),
        tensor_(std::move(tensor)),
        stage_({tensor_}),
        peer_(peer),
        tag_(tag),
        sends_(sends),
        timeout_(timeout),
        what_(std::move(what)) {}

  void start() override {
    guarded([this] {
      deadline_ = Clock::now() + timeout_;
      stage_.set_deadline(deadline_);
      bytes_ = tensor_.nbytes();
      auto use = sends_ ? Stage::Use::read : Stage::Use::write;
      data_ = static_cast<uint8_t*>(stage_.place(tensor_, use, mpi_is_cuda_aware()));
      stage_.fetch();
      if (sends_) {
        requests_.send(group_->transfers(), peer_, tag_, data_, bytes_);
      } else {
        // The first message tells who sends; the rest of a very long tensor comes from there too.
        first_ = std::min(bytes_, kMessage);
        requests_.receive(group_->transfers(), peer_, tag_, data_, first_);
      }
    });
  }

  bool poll() override {
    if (!done_) {
      guarded([this] {
        if (!requests_.test()) {
          if (++polls_ % 64 == 0) {
            group_->check();
            if (Clock::now() > deadline_) {
              throw Late(peer_ == MPI_ANY_SOURCE ? "no rank has sent anything in time"
                                                 : "no answer in time from rank " + std::to_string(name(peer_)),
                         {});
            }
          }
          return;
        }
        if (!sends_ && !rest_) {
          int got = 0;
          MPI_Get_count(&requests_.last(), MPI_BYTE, &got);
          peer_ = requests_.last().MPI_SOURCE;
          if (static_cast<size_t>(got) != first_) {
            throw std::invalid_argument("rank " + std::to_string(name(peer_)) + " sent " + std::to_string(got) +
                                        " bytes, this rank expected " + std::to_string(first_));
          }
          if (bytes_ > first_) {
            rest_ = true;
            requests_.receive(group_->transfers(), peer_, tag_, data_ + first_, bytes_ - first_);
            return;
          }
        }
        group_->count_transfer(sends_);
        work_->set_source(peer_);
        stage_.give_back();
        finish(nullptr);
      });
    }
    return done_;
  }

 private:
  int name(int rank) const { return group_->name_of_rank(rank); }

  void finish(const std::exception_ptr& error) {
    done_ = true;
    work_->complete(error ? as_torch_error(error) : nullptr);
  }

  template <typename Body>
  void guarded(const Body& body) {
    try {
      group_->run(what_, work_->getSequencenumber(), body);
    } catch (...) {
      finish(std::current_exception());
    }
  }

  std::shared_ptr<Group> group_;
  c10::intrusive_ptr<MpiWork> work_;
  at::Tensor tensor_;
  Stage stage_;
  int peer_, tag_;
  bool sends_, done_ = false, rest_ = false;
  Group::Timeout timeout_;
  std::string what_;
  Clock::time_point deadline_;
  size_t bytes_ = 0, first_ = 0;
  uint8_t* data_ = nullptr;
  unsigned polls_ = 0;
  Requests requests_;
};

}  // namespace

c10::intrusive_ptr<MpiBackend> MpiBackend::create(const c10::intrusive_ptr<c10d::Store>& store,
                                                  GroupSettings settings) {
  auto& engine = Engine::instance();
  engine.require_running();
  settings.names.resize(settings.size);
  auto world_ranks = meet(*store, settings, engine.rank());
  return c10::make_intrusive<MpiBackend>(Group::create(settings, world_ranks), settings.timeout);
}

MpiBackend::MpiBackend(std::shared_ptr<Group> group, std::chrono::milliseconds timeout)
    : c10d::Backend(group->rank(), group->size()), group_(std::move(group)), timeout_(timeout) {}

MpiBackend::~MpiBackend() = default;

c10::intrusive_ptr<c10d::Backend::Options> MpiBackend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(kBackendName, timeout_);
  options->group_name = group_->name();
  return options;
}

void MpiBackend::setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

c10d::ErrorType MpiBackend::getError() {
  return group_->broken() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void MpiBackend::abort() {
  closed_ = true;
  group_->fail("the group was aborted on rank " + std::to_string(group_->name_of_rank(rank_)));
}

void MpiBackend::shutdown() { closed_ = true; }

std::chrono::milliseconds MpiBackend::timeout_or_own(std::chrono::milliseconds timeout) const {
  return timeout.count() > 0 ? timeout : timeout_;
}

MpiBackend::WorkPtr MpiBackend::submit(Request request, std::function<void(Running&)> body) {
  TORCH_CHECK(!closed_, "group '", group_->name(), "' was destroyed or aborted: no ", request.what, " is possible");
  auto& statistics = Engine::instance().statistics();
  ++statistics.operations;
  bool on_cpu = true;
  for (const auto* tensors : {&request.inputs, &request.outputs}) {
    for (const auto& tensor : *tensors) {
      TORCH_CHECK(tensor.layout() == at::kStrided, request.what, " takes dense tensors only");
      on_cpu = on_cpu && tensor.device().is_cpu();
    }
  }
  for (const auto& tensor : request.outputs) statistics.bytes += tensor.nbytes();
  const auto timeout = timeout_or_own(request.timeout);
  Tensors kept = std::move(request.inputs);
  auto outputs = request.outputs;
  kept.insert(kept.end(), outputs.begin(), outputs.end());

  // Numbers, and the order of operations, must be the same on all ranks: one submission at a time.
  std::lock_guard<std::mutex> lock(submitting_);
  const uint64_t number = ++sequence_;
  auto work =
      c10::make_intrusive<MpiWork>(rank_, request.type, request.what, number, std::move(outputs), kept, timeout);
  auto stage = std::make_shared<Stage>(kept);
  const char* what = request.what;
  auto group = group_;
  auto run = [group, what, number, timeout](Stage& stage, const std::function<void(Running&)>& body) {
    try {
      group->run(what, number, [&] {
        stage.set_deadline(Clock::now() + timeout);
        Running running{*group, stage, timeout};
        body(running);
      });
    } catch (...) {
      return as_torch_error(std::current_exception());
    }
    return std::exception_ptr();
  };

  if (request.may_run_here && on_cpu && *outstanding_ == 0) {
    std::exception_ptr error;
    auto here = [&] { error = run(*stage, body); };
    const bool needs_mpi = !group_->in_memory() && size_ > 1;
    if (needs_mpi) {
      Engine::instance().require_running();
    } else {
      here();
    }
    if (!needs_mpi || Engine::instance().run_here(here)) {
      ++statistics.inline_operations;
      work->complete(error);
      return work;
    }
  }
  Engine::instance().require_running();
  ++*outstanding_;
  Engine::instance().submit([run, body = std::move(body), work, stage, outstanding = outstanding_]() mutable {
    if (stage->on_device()) work->set_stream(*stage->stream());
    auto error = run(*stage, body);
    stage.reset();
    --*outstanding;  // before the caller wakes: his next operation may then run in his own thread
    work->complete(error);
  });
  return work;
}

MpiBackend::WorkPtr MpiBackend::transfer(c10d::OpType type, const char* what, Tensors& tensors, int peer, int tag) {
  TORCH_CHECK(!closed_, "group '", group_->name(), "' was destroyed or aborted: no ", what, " is possible");
  TORCH_CHECK(tensors.size() == 1, what, " takes one tensor");
  TORCH_CHECK(tensors[0].layout() == at::kStrided, what, " takes dense tensors only");
  TORCH_CHECK(size_ > 1, what, ": this group has one rank only");
  TORCH_CHECK(tag >= 0 && tag < 32767, what, ": the tag ", tag, " is not between 0 and 32,766");
  const bool sends = type == c10d::OpType::SEND, any = type == c10d::OpType::RECVANYSOURCE;
  TORCH_CHECK(any || (peer >= 0 && peer < size_), what, ": rank ", peer, " is not in a group of ", size_);
  Engine::instance().require_running();
  ++Engine::instance().statistics().operations;
  Engine::instance().statistics().bytes += tensors[0].nbytes();
  std::string text = what;
  if (!any) text += (sends ? " to rank " : " from rank ") + std::to_string(group_->name_of_rank(peer));
  // Not numbered: who sends to whom is not the same on all ranks.
  auto work = c10::make_intrusive<MpiWork>(rank_, type, what, sequence_.load(), tensors, Tensors(), timeout_);
  Engine::instance().submit(std::make_shared<PointToPoint>(group_, work, tensors[0], any ? MPI_ANY_SOURCE : peer, tag,
                                                           sends, timeout_, text));
  return work;
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int to, int tag) {
  return transfer(c10d::OpType::SEND, "send", tensors, to, tag);
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int from, int tag) {
  return transfer(c10d::OpType::RECV, "recv", tensors, from, tag);
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  return transfer(c10d::OpType::RECVANYSOURCE, "recv from any rank", tensors, -1, tag);
}

}  // namespace dtrain
