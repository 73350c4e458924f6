// An accelerator on the CPU whose streams are really asynchronous; `__init__.py` says what for.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "communicator.h"

namespace async_device {

// One device per process.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  static c10::Stream stream(int number) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), number);
  }
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(kDevice, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Lock lock;
    return stream(new_stream());
  }
  c10::Stream exchangeStream(c10::Stream chosen) const override {
    return stream(std::exchange(current_stream, static_cast<int>(chosen.id())));
  }
  bool queryStream(const c10::Stream& asked) const override {
    Lock lock;
    return device().queues[asked.id()].empty();
  }
  void synchronizeStream(const c10::Stream& waited) const override { synchronize_stream(static_cast<int>(waited.id())); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_device(); }

  static EventPtr& event_in(void* event) { return *static_cast<EventPtr*>(event); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    if (!*event) *event = new EventPtr;
    event_in(*event) = async_device::record(static_cast<int>(on.id()));
  }
  void block(void* event, const c10::Stream& waiting) const override {
    Lock lock;
    if (event) wait_for(static_cast<int>(waiting.id()), event_in(event));
  }
  bool queryEvent(void* event) const override { return !event || event_in(event)->is_done; }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(event_in(event));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }  // no clock
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& user) const override {
    share(data.get(), static_cast<int>(user.id()));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct PinnedAllocator final : at::HostAllocator {
  at::DataPtr allocate(size_t num_bytes) override {
    void* start = allocate_pinned(num_bytes);
    return {start, start, &release_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* into, const void* from, std::size_t num_bytes) const final { std::memcpy(into, from, num_bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator& pinned_allocator() {
  static auto& only = *new PinnedAllocator;
  return only;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(kDevice, 0); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto& only = *new at::Generator(at::detail::createCPUGenerator(0));
    return only;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(0); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

// Choose the order of tasks. Whatever is queued runs first.
void set_order(const std::string& name, unsigned seed) {
  static const std::map<std::string, Order> orders{{"early", Order::Early},
                                                   {"late", Order::Late},
                                                   {"sides first", Order::SidesFirst},
                                                   {"sides last", Order::SidesLast},
                                                   {"random", Order::Random}};
  synchronize_device();
  Lock lock;
  auto& d = device();
  d.order = orders.at(name);
  d.random.seed(seed);
  static const int choices[] = {0, 1, 1, 4};
  for (auto& weight : d.weights) weight = choices[d.random() % 4];
}

// Set what each task lasts, by its name, after all work; returns the virtual time, from which all streams go on.
double set_durations(std::map<std::string, double> durations_s) {
  synchronize_device();
  Lock lock;
  auto& d = device();
  d.durations_s = std::move(durations_s);
  const double now_s = *std::max_element(d.times_s.begin(), d.times_s.end());
  std::fill(d.times_s.begin(), d.times_s.end(), now_s);
  return now_s;
}

// Forget what is queued, errors, and communicators: other ranks are told that this one has left.
void reset() {
  Lock lock;
  for (auto& [boards, rank] : process().own_boards) boards[rank].has_left.store(1);
  for (auto& [start, num_bytes] : process().mappings) munmap(start, num_bytes);
  process() = Process();
  auto& d = device();
  for (auto& queue : d.queues) {
    for (auto& task : queue)
      if (task.reaches) task.reaches->is_done = true;
    queue.clear();
  }
  d.durations_s.clear();
  for (auto& clock : d.clocks) join(d.host, clock);  // nothing uses memory that is freed later
  d.error.clear();
  d.hazards.clear();
  d.counts.clear();
}

}  // namespace async_device

using namespace async_device;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static Hooks hooks;
  at::SetAllocator(kDevice, &device_allocator());
  at::setHostAllocator(kDevice, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(&hooks);
  py::module_::import("torch.distributed");
  module.def("communicator", [](std::string name, const std::string& path, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Communicator>(std::move(name), path, rank, size));
  });
  module.def("set_order", &set_order, py::call_guard<py::gil_scoped_release>());
  module.def("set_durations", &set_durations, py::call_guard<py::gil_scoped_release>());
  module.def("synchronize", &synchronize_device, py::call_guard<py::gil_scoped_release>());
  module.def("reset", &reset);
  module.def("set_patience", [](double seconds) { device().patience_s = seconds; });
  module.def("hazards", [] {
    Lock lock;
    return std::exchange(device().hazards, {});
  });
  module.def("counts", [] {
    Lock lock;
    return std::exchange(device().counts, {});
  });
}
