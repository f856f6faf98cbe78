// What Python sees of the extension. All functions release the GIL while they wait.
//
//   init(timeout_seconds=300.0) -> (rank, size)    start the communication thread and MPI in it; again: the same answer
//   initialized() -> bool                          whether init() has succeeded in this process
//   host_name() -> str                             this machine, as MPI names it
//   library() -> str                               the MPI library and its version, one line (works before init)
//   cuda_aware() -> bool                           whether this MPI says that it takes pointers to device memory
//   local_rank() / local_size() -> int             place of this process among those of its host
//   broadcast_bytes(data: bytes, root=0, timeout_seconds=300.0) -> bytes
//       over MPI_COMM_WORLD, before any store exists
//   create_backend(store, rank, size, timeout: timedelta, group_name, global_ranks: list[int] = [],
//                  options: dict[str, str] = {}) -> MpiBackend
//       global_ranks: how messages call the ranks of the group (empty: 0, 1, ...)
//       options: "ranks_per_host" (pretend that so many ranks make a host; 0: as it is), "shared_memory" ("0": never);
//       without them the environment variables DTRAIN_MPI_RANKS_PER_HOST and DTRAIN_MPI_SHARED_MEMORY decide.
//   shutdown(timeout_seconds=20.0) -> bool         MPI_Finalize, within a bound; after a failure False and no finalize.
//                                                  Also done at exit of the interpreter, unless an exception ended it.
//   abort(code)                                    MPI_Abort: ends the job at once
//   statistics() -> dict                           operations, bytes, busy_seconds (communication thread at work),
//                                                  inline_operations (done in the caller's own thread),
//                                                  communicators (of groups, not freed yet)
//   plain_allreduce(tensor, repeat=1) -> float     seconds per MPI_Allreduce (sum, in place) over all ranks of the job,
//                                                  called as a C program would; float32 on the CPU; for benchmarks only
//
//   MpiBackend (a torch.distributed Backend; get one by group._get_backend(torch.device("cpu"))):
//       .allreduce_compressed(tensor, wire="bf16" | "int8", average=False) -> Work     float32; same bits on every rank
//       .topology() -> dict     hosts, ranks_per_host, shared_memory (bool), why_not (no shared memory, why; or "")
//       .failure() -> str       why the group is broken, or ""
//       .timed_allreduce(tensor, repeat=1) -> float    seconds per all-reduce (sum) that is waited for, without Python in
//                                                      between; for benchmarks only
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdlib>
#include <cstring>

#include "backend.h"
#include "engine.h"

namespace py = pybind11;

namespace dtrain {

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

/// A setting from the options, else from the environment, else "".
std::string setting(const std::map<std::string, std::string>& options, const char* name, const char* variable) {
  auto found = options.find(name);
  if (found != options.end()) return found->second;
  const char* value = std::getenv(variable);
  return value ? value : "";
}

int number(const std::string& text, const char* name) {
  if (text.empty()) return 0;
  char* end = nullptr;
  long value = std::strtol(text.c_str(), &end, 10);
  if (*end != 0 || value < 0) throw std::invalid_argument(std::string(name) + " is '" + text + "', not a number");
  return static_cast<int>(value);
}

c10::intrusive_ptr<MpiBackend> create_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                              std::chrono::milliseconds timeout, const std::string& name,
                                              const std::vector<int>& global_ranks,
                                              const std::map<std::string, std::string>& options) {
  for (const auto& [key, value] : options) {
    if (key != "ranks_per_host" && key != "shared_memory") {
      throw std::invalid_argument("unknown option '" + key + "'; there are 'ranks_per_host' and 'shared_memory'");
    }
  }
  GroupSettings settings;
  settings.name = name;
  settings.rank = rank;
  settings.size = size;
  settings.names = global_ranks;
  if (settings.names.size() != static_cast<size_t>(size)) {
    settings.names.clear();
    for (int i = 0; i < size; ++i) settings.names.push_back(i);
  }
  settings.timeout = timeout;
  settings.ranks_per_host = number(setting(options, "ranks_per_host", "DTRAIN_MPI_RANKS_PER_HOST"), "ranks_per_host");
  settings.shared_memory = setting(options, "shared_memory", "DTRAIN_MPI_SHARED_MEMORY") != "0";
  return MpiBackend::create(store, settings);
}

py::bytes broadcast_bytes(const py::bytes& data, int root, double timeout) {
  auto message = std::make_shared<std::string>(data);
  {
    py::gil_scoped_release release;
    auto& engine = Engine::instance();
    engine.call(
        [message, root, &engine] {
          unsigned long long bytes = message->size();
          check_mpi(MPI_Bcast(&bytes, 1, MPI_UNSIGNED_LONG_LONG, root, engine.world()), "MPI_Bcast");
          if (bytes > (1u << 26)) throw std::invalid_argument("broadcast_bytes takes up to 64 MB");
          message->resize(bytes);
          check_mpi(MPI_Bcast(&(*message)[0], static_cast<int>(bytes), MPI_BYTE, root, engine.world()), "MPI_Bcast");
        },
        milliseconds(timeout), "broadcast_bytes");
  }
  return py::bytes(*message);
}

/// What MPI itself takes for it: the measure of our own.
double plain_allreduce(const at::Tensor& tensor, int repeat) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.device().is_cpu() && tensor.is_contiguous(),
              "plain_allreduce takes a contiguous float32 tensor on the CPU");
  auto seconds = std::make_shared<double>(0);
  auto& engine = Engine::instance();
  engine.call(
      [=, &engine] {
        auto begin = Clock::now();
        for (int i = 0; i < repeat; ++i) {
          check_mpi(MPI_Allreduce(MPI_IN_PLACE, tensor.data_ptr(), static_cast<int>(tensor.numel()), MPI_FLOAT, MPI_SUM,
                                  engine.world()),
                    "MPI_Allreduce");
        }
        *seconds = std::chrono::duration<double>(Clock::now() - begin).count() / repeat;
      },
      milliseconds(600), "plain_allreduce");
  return *seconds;
}

double timed_allreduce(MpiBackend& backend, const at::Tensor& tensor, int repeat) {
  MpiBackend::Tensors tensors{tensor};
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  auto begin = Clock::now();
  for (int i = 0; i < repeat; ++i) backend.allreduce(tensors, options)->wait();
  return std::chrono::duration<double>(Clock::now() - begin).count() / repeat;
}

std::map<std::string, double> statistics() {
  auto& now = Engine::instance().statistics();
  return {{"operations", static_cast<double>(now.operations.load())},
          {"inline_operations", static_cast<double>(now.inline_operations.load())},
          {"bytes", static_cast<double>(now.bytes.load())},
          {"communicators", static_cast<double>(now.communicators.load())},
          {"busy_seconds", static_cast<double>(now.busy_nanoseconds.load()) * 1e-9}};
}

}  // namespace

}  // namespace dtrain

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace dtrain;
  auto& engine = Engine::instance();
  m.def(
      "init",
      [&engine](double timeout) {
        engine.start(milliseconds(timeout));
        return std::make_pair(engine.rank(), engine.size());
      },
      py::arg("timeout_seconds") = 300.0, NoGil());
  m.def("initialized", [&engine] { return engine.running(); });
  m.def("host_name", [&engine] { return engine.host_name(); });
  m.def("local_rank", [&engine] { return engine.local_rank(); });
  m.def("local_size", [&engine] { return engine.local_size(); });
  m.def("library", &mpi_library);
  m.def("cuda_aware", &mpi_is_cuda_aware);
  m.def("broadcast_bytes", &broadcast_bytes, py::arg("data"), py::arg("root") = 0, py::arg("timeout_seconds") = 300.0);
  m.def("create_backend", &create_backend, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
        py::arg("group_name"), py::arg("global_ranks") = std::vector<int>(),
        py::arg("options") = std::map<std::string, std::string>(), NoGil());
  m.def(
      "shutdown", [&engine](double timeout) { return engine.shutdown(milliseconds(timeout)); },
      py::arg("timeout_seconds") = 20.0, NoGil());
  m.def(
      "abort",
      [&engine](int code) {
        if (engine.running()) engine.call([code] { MPI_Abort(MPI_COMM_WORLD, code); }, milliseconds(2), "MPI_Abort");
      },
      py::arg("code"), NoGil());
  m.def("statistics", &statistics);
  m.def("plain_allreduce", &plain_allreduce, py::arg("tensor"), py::arg("repeat") = 1, NoGil());

  py::object base = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<MpiBackend, c10::intrusive_ptr<MpiBackend>>(m, "MpiBackend", base)
      .def(
          "allreduce_compressed",
          [](MpiBackend& self, const at::Tensor& tensor, const std::string& wire, bool average) {
            if (wire != "bf16" && wire != "int8") {
              throw std::invalid_argument("wire is '" + wire + "'; there are 'bf16' and 'int8'");
            }
            return self.allreduce_compressed(tensor, wire == "bf16" ? Wire::bf16 : Wire::int8, average);
          },
          py::arg("tensor"), py::arg("wire"), py::arg("average") = false, NoGil())
      .def("timed_allreduce", &timed_allreduce, py::arg("tensor"), py::arg("repeat") = 1, NoGil())
      .def("topology",
           [](const MpiBackend& self) {
             py::dict facts;
             facts["hosts"] = self.group().hosts();
             facts["ranks_per_host"] = self.group().ranks_per_host();
             facts["shared_memory"] = self.group().shared_memory();
             facts["why_not"] = self.group().why_not();
             return facts;
           })
      .def("_set_default_timeout", &MpiBackend::setTimeout, py::arg("timeout"))  // torch's name for it
      .def("failure", [](const MpiBackend& self) { return self.group().failure(); });

  // MPI ends with the interpreter, if all went well. After a failure (here: an exception that nobody caught) it is left
  // as it is: MPI_Finalize would wait for the other ranks, and mpirun ends the job when a rank leaves without it.
  py::module_::import("atexit").attr("register")(py::cpp_function([&engine] {
    py::object raised = py::getattr(py::module_::import("sys"), "last_value", py::none());
    if (!raised.is_none()) engine.mark_failed();
    py::gil_scoped_release release;
    engine.shutdown(milliseconds(10));
  }));
}
