// A simulated accelerator: a PrivateUse1 backend of torch whose memory is host memory, and whose streams are threads.
//
// It promises what an accelerator promises and no more, so that a wait that is missing, or a reference that is dropped
// too early, shows as wrong data:
// - each stream is a queue that a thread of its own works through, at its own random pace; it can be held;
// - copies, fill_, zero_ and add_ are queued. Anything else is copied to the CPU, done there, and copied back, in the
//   order of the current stream; nothing waits for the other streams;
// - device memory comes from one pool per stream, which hands a freed block on at once, the last freed first. Its new
//   owner begins by writing POISON, in the order of the stream;
// - a pinned block is poisoned and free as soon as nobody refers to it, unless `careful_host` asks for the mercy that
//   CUDA's allocator has: then it waits for the queued copies that read it.
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace at {
// ATen/CPUGeneratorImpl.h would bring in much more.
namespace detail {
TORCH_API Generator createCPUGenerator(uint64_t seed_val);
}
}  // namespace at

namespace {

using Clock = std::chrono::steady_clock;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr DeviceIndex DEVICES = 2;
constexpr StreamId STREAMS = 33;  // of each device: the default one, and a pool as large as CUDA's
constexpr int POISON = 0xA5;

Device device_at(DeviceIndex index) { return Device(c10::kPrivateUse1, index); }

// ---------------------------------------------------------------------------------------------------- streams, events

// One recording of an event, or the end of one task.
struct Mark {
  bool done = false;
  Clock::time_point at;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Task {
  std::function<void()> work;  // may be empty
  MarkPtr after;               // the task waits for it; may be empty
  MarkPtr mark;                // is done when the task is
};

struct Line {
  std::deque<Task> queue;
  bool started = false;
  bool busy = false;
  bool held = false;
  std::mt19937 random;
  int pace = 1;  // a slow stream is some times slower than a fast one
};

struct Machine {
  std::mutex mutex;  // of all that follows
  std::condition_variable changed;
  Line lines[DEVICES][STREAMS];
  StreamId handed_out[DEVICES] = {};
  int64_t most_microseconds = 0;
  bool careful_host = true;
  bool poison = true;
  std::string fault;
  pid_t owner = 0;
};

Machine& machine() {
  static Machine* one = new Machine;  // never destroyed: its threads outlive main
  return *one;
}

// As with CUDA, a process that has used the device leaves its forks without one.
bool in_fork() { return machine().owner != 0 && machine().owner != getpid(); }

thread_local DeviceIndex current_index = 0;
thread_local StreamId current_ids[DEVICES] = {};

Stream stream_of(DeviceIndex device, StreamId id) { return Stream(Stream::UNSAFE, device_at(device), id); }

DeviceIndex checked(DeviceIndex device) {
  if (device == -1) return current_index;
  TORCH_CHECK(device >= 0 && device < DEVICES, "there is no simulated device ", int(device), ", only ", int(DEVICES));
  return device;
}

Stream current_stream(Device device) {
  DeviceIndex index = checked(device.index());
  return stream_of(index, current_ids[index]);
}

void work_through(Line& line) {
  Machine& m = machine();
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  std::unique_lock<std::mutex> lock(m.mutex);
  for (;;) {
    m.changed.wait(lock, [&] {
      return !line.held && !line.queue.empty() && (!line.queue.front().after || line.queue.front().after->done);
    });
    Task task = std::move(line.queue.front());
    line.queue.pop_front();
    line.busy = true;
    auto pause = task.work && m.most_microseconds ? line.random() % (m.most_microseconds * line.pace) : 0;
    lock.unlock();
    std::string fault;
    if (pause) std::this_thread::sleep_for(std::chrono::microseconds(pause));
    try {
      if (task.work) task.work();
      task.work = nullptr;
    } catch (const std::exception& error) {
      fault = error.what();
    }
    lock.lock();
    if (m.fault.empty()) m.fault = fault;
    line.busy = false;
    task.mark->done = true;
    task.mark->at = Clock::now();
    m.changed.notify_all();
  }
}

// Sets the pace of a line anew. The caller holds the lock.
void draw_pace(Line& line, int64_t seed, DeviceIndex device, StreamId id) {
  std::seed_seq seeds{int64_t(seed), int64_t(device), int64_t(id)};
  line.random.seed(seeds);
  const int paces[] = {1, 1, 4, 16};
  line.pace = paces[line.random() % 4];
}

Line& line_of(const Stream& stream) {  // the caller holds the lock
  Machine& m = machine();
  TORCH_CHECK(!in_fork(), "the simulated accelerator cannot be used in a fork of its process");
  m.owner = getpid();
  Line& line = m.lines[checked(stream.device_index())][stream.id()];
  if (!line.started) {
    line.started = true;
    std::thread(work_through, std::ref(line)).detach();
  }
  return line;
}

MarkPtr push(const Stream& stream, std::function<void()> work, MarkPtr after = nullptr) {
  Machine& m = machine();
  auto mark = std::make_shared<Mark>();
  std::lock_guard<std::mutex> lock(m.mutex);
  line_of(stream).queue.push_back({std::move(work), std::move(after), mark});
  m.changed.notify_all();
  return mark;
}

MarkPtr record(const Stream& stream) { return push(stream, nullptr); }

void wait_on_host(const MarkPtr& mark) {
  Machine& m = machine();
  std::unique_lock<std::mutex> lock(m.mutex);
  m.changed.wait(lock, [&] { return mark->done; });
  TORCH_CHECK(m.fault.empty(), "a queued task of the simulated accelerator failed: ", m.fault);
}

bool is_done(const MarkPtr& mark) {
  std::lock_guard<std::mutex> lock(machine().mutex);
  return mark->done;
}

void synchronize_device(DeviceIndex device) {
  std::vector<MarkPtr> marks;
  for (StreamId id = 0; id < STREAMS; ++id) {
    {
      std::lock_guard<std::mutex> lock(machine().mutex);
      if (!machine().lines[device][id].started) continue;
    }
    marks.push_back(record(stream_of(device, id)));
  }
  for (auto& mark : marks) wait_on_host(mark);
}

// -------------------------------------------------------------------------------------------------------------- memory

struct Block {
  void* memory;
  size_t size;
  DeviceIndex device;           // -1: of the host
  StreamId stream;              // whose pool it belongs to
  std::vector<Stream> used_on;  // what record_stream told
  std::vector<MarkPtr> until;   // it is handed on when they are done
};

// A caching allocator. Blocks are as large as the next power of two, so that batches of varying size share them.
class Cache {
 public:
  std::mutex mutex;  // taken before the machine's
  int64_t reserved[DEVICES + 1] = {}, allocated[DEVICES + 1] = {};

  Block* take(size_t bytes, DeviceIndex device, StreamId stream) {
    size_t size = 512;
    while (size < bytes) size *= 2;
    std::lock_guard<std::mutex> lock(mutex);
    settle();
    auto& free = free_[{device, stream, size}];
    Block* block;
    if (free.empty()) {
      void* memory = nullptr;
      TORCH_CHECK(posix_memalign(&memory, 4096, size) == 0, "the simulated accelerator has no ", size, " bytes left");
      std::memset(memory, POISON, size);
      block = new Block{memory, size, device, stream, {}, {}};
      reserved[device + 1] += size;
    } else {
      block = free.back();
      free.pop_back();
    }
    allocated[device + 1] += size;
    live_[uintptr_t(block->memory)] = block;
    return block;
  }

  void give(Block* block) {
    std::lock_guard<std::mutex> lock(mutex);
    live_.erase(uintptr_t(block->memory));
    allocated[block->device + 1] -= block->size;
    if (!in_fork()) {
      for (auto& stream : block->used_on) block->until.push_back(record(stream));
    }
    block->used_on.clear();
    waiting_.push_back(block);
    settle();
  }

  // The block that an address lies in; the caller holds the lock.
  Block* find(const void* address) {
    auto after = live_.upper_bound(uintptr_t(address));
    if (after == live_.begin()) return nullptr;
    Block* block = std::prev(after)->second;
    return uintptr_t(address) < uintptr_t(block->memory) + block->size ? block : nullptr;
  }

  void empty() {
    std::lock_guard<std::mutex> lock(mutex);
    settle();
    for (auto& [key, blocks] : free_) {
      for (Block* block : blocks) {
        reserved[block->device + 1] -= block->size;
        std::free(block->memory);
        delete block;
      }
      blocks.clear();
    }
  }

 private:
  std::map<std::tuple<DeviceIndex, StreamId, size_t>, std::vector<Block*>> free_;
  std::map<uintptr_t, Block*> live_;
  std::vector<Block*> waiting_;

  void settle() {
    std::vector<Block*> left;
    for (Block* block : waiting_) {
      bool ready = true;
      for (auto& mark : block->until) ready = ready && is_done(mark);
      if (!ready) {
        left.push_back(block);
        continue;
      }
      block->until.clear();
      if (block->device < 0 && machine().poison) std::memset(block->memory, POISON, block->size);
      free_[{block->device, block->stream, block->size}].push_back(block);
    }
    waiting_.swap(left);
  }
};

Cache& cache() {
  static Cache* one = new Cache;
  return *one;
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(cache().mutex);
  Block* block = cache().find(address);
  return block && block->device < 0;
}

void give_back(void* block) { cache().give(static_cast<Block*>(block)); }

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device = device_at(current_index);
    if (!bytes) return {nullptr, nullptr, &give_back_nothing, device};
    Stream stream = current_stream(device);
    Block* block = cache().take(bytes, current_index, stream.id());
    void* memory = block->memory;
    if (machine().poison) push(stream, [=] { std::memset(memory, POISON, bytes); });
    return {memory, block, &give_back, device};
  }
  static void give_back_nothing(void*) {}
  void copy_data(void* target, const void* source, size_t bytes) const override {
    wait_on_host(push(current_stream(device_at(-1)), [=] { std::memcpy(target, source, bytes); }));
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (DeviceIndex device = 0; device < DEVICES; ++device) synchronize_device(device);
    cache().empty();
  }
  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    std::lock_guard<std::mutex> lock(cache().mutex);
    Block* block = cache().find(pointer.get());
    if (block && block->stream != stream.id()) block->used_on.push_back(stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(cache().mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.reserved_bytes[0].current = cache().reserved[checked(device) + 1];
    stats.allocated_bytes[0].current = cache().allocated[checked(device) + 1];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    Block* block = cache().take(bytes, -1, 0);
    return {block->memory, block, &give_back, c10::kCPU};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
  bool record_event(void* pointer, void*, Stream stream) override {
    MarkPtr mark = record(stream);
    std::lock_guard<std::mutex> lock(cache().mutex);
    Block* block = cache().find(pointer);
    if (block && block->device < 0) block->until.push_back(mark);
    return block;
  }
  void empty_cache() override { DeviceMemory().emptyCache({0, 0}); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(c10::kPrivateUse1, &device_memory)
REGISTER_HOST_ALLOCATOR(c10::kPrivateUse1, &pinned_memory)

// --------------------------------------------------------------------------------------------------------- the guard

struct Event {
  MarkPtr mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return device_at(current_index); }
  void setDevice(Device device) const override { current_index = checked(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current_index = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  Stream getStream(Device device) const override { return current_stream(device); }
  Stream getDefaultStream(Device device) const override { return stream_of(checked(device.index()), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    DeviceIndex index = checked(device.index());
    std::lock_guard<std::mutex> lock(machine().mutex);
    return stream_of(index, 1 + machine().handed_out[index]++ % (STREAMS - 1));
  }
  Stream exchangeStream(Stream stream) const override {
    Stream before = current_stream(stream.device());
    current_ids[checked(stream.device_index())] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return &machine().lines[checked(stream.device_index())][stream.id()];
  }
  bool queryStream(const Stream& stream) const override {
    std::lock_guard<std::mutex> lock(machine().mutex);
    Line& line = line_of(stream);
    return line.queue.empty() && !line.busy;
  }
  void synchronizeStream(const Stream& stream) const override { wait_on_host(::record(stream)); }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_device(checked(device)); }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->mark = ::record(stream);
  }
  void block(void* event, const Stream& stream) const override {
    if (event) push(stream, nullptr, static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override { return !event || is_done(static_cast<Event*>(event)->mark); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_on_host(static_cast<Event*>(event)->mark);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* last, const DeviceIndex) const override {
    auto time = [](void* event) { return static_cast<Event*>(event)->mark->at; };
    return std::chrono::duration<double, std::milli>(time(last) - time(first)).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    device_memory.recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ------------------------------------------------------------------------------------------------------ random numbers

// A generator of the device: one of the CPU, which the operations done there draw from.
struct SimulatedGenerator final : c10::GeneratorImpl {
  at::Generator inner;

  SimulatedGenerator(DeviceIndex device, at::Generator inner_)
      : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(inner_)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.unsafeGetGeneratorImpl()->get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  SimulatedGenerator* clone_impl() const override { return new SimulatedGenerator(device_.index(), inner.clone()); }
};

at::Generator new_generator(DeviceIndex device) {
  return at::make_generator<SimulatedGenerator>(
      checked(device), at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

at::Generator& default_generator(DeviceIndex device) {
  static auto* all = new std::vector<at::Generator>{new_generator(0), new_generator(1)};
  return (*all)[checked(device)];
}

// ---------------------------------------------------------------------------------------------------------- the hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex device) const override { current_index = checked(device); }
  DeviceIndex getCurrentDevice() const override { return current_index; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_index, checked(device)); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(device); }
  Device getDeviceFromPtr(void* address) const override {
    std::lock_guard<std::mutex> lock(cache().mutex);
    Block* block = cache().find(address);
    TORCH_CHECK(block && block->device >= 0, "this is no memory of a simulated device");
    return device_at(block->device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DataPtr grown = device_memory.allocate(bytes);
    void* target = grown.get();
    const void* source = storage.data();
    size_t kept = std::min(bytes, storage.nbytes());
    if (kept) push(current_stream(storage.device()), [=] { std::memcpy(target, source, kept); });
    impl->set_data_ptr(std::move(grown));
    impl->set_nbytes(bytes);
  }
};

// ------------------------------------------------------------------------------------------------------- the operators

// The same memory as a tensor of the CPU, which keeps nothing alive.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

// Whether a copy is one of bytes, as the engines of a device can do it.
bool alike(const at::Tensor& source, const at::Tensor& target) {
  return source.dtype() == target.dtype() && source.strides() == target.strides() &&
      source.is_non_overlapping_and_dense();
}

std::function<void()> copying(const at::Tensor& source, const at::Tensor& target) {
  if (alike(source, target)) {
    auto* to = const_cast<void*>(target.const_data_ptr());
    return [=, from = source.const_data_ptr(), bytes = source.nbytes()] { std::memcpy(to, from, bytes); };
  }
  return [from = on_host(source), to = on_host(target)]() mutable { to.copy_(from); };
}

void copy_within(const at::Tensor& source, const at::Tensor& target) {
  Stream here = current_stream(source.device()), there = current_stream(target.device());
  if (here == there) {
    push(here, copying(source, target));
    return;
  }
  push(here, nullptr, record(there));
  push(there, nullptr, push(here, copying(source, target)));
}

void copy_to_or_from_host(at::Tensor source, const at::Tensor& target, bool non_blocking) {
  bool up = source.is_cpu();
  Stream stream = current_stream(up ? target.device() : source.device());
  const void* outside = (up ? source : target).const_data_ptr();
  bool queued = non_blocking && is_pinned(outside) && alike(source, target);
  MarkPtr mark = push(stream, copying(source, target));
  if (!queued) {
    wait_on_host(mark);
  } else if (machine().careful_host) {
    pinned_memory.record_event(const_cast<void*>(outside), nullptr, stream);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (!target.numel()) return target;
  at::Tensor source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
  TORCH_CHECK(!source.is_conj() && !source.is_neg(), "the simulated accelerator has no lazy conjugates");
  if (source.is_cpu() || target.is_cpu()) {
    copy_to_or_from_host(source, target, non_blocking);
  } else {
    copy_within(source, target);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Tensor empty_memory_format(
    c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(device_at(checked(c10::device_or_default(device).index())));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_at(checked(c10::device_or_default(device).index())));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor& fill_scalar(at::Tensor& self, const at::Scalar& value) {
  if (self.numel()) push(current_stream(self.device()), [to = on_host(self), value]() mutable { to.fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill_scalar(self, 0); }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  std::optional<DeviceIndex> device;
  for (size_t place = first; place < stack->size() && !device; ++place) {
    const auto& value = (*stack)[place];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().is_privateuseone()) {
      device = value.toTensor().device().index();
    }
  }
  for (size_t number = 0; number < arguments.size(); ++number) {
    auto& value = (*stack)[first + number];
    if (arguments[number].name() != "generator") continue;
    at::Generator used;
    if (!value.isNone()) used = value.toGenerator();
    if (!used.defined() && device) used = default_generator(*device);
    if (!used.defined()) continue;
    TORCH_CHECK(
        device && used.device().is_privateuseone(), "the generator is of ", used.device(), ", the tensors are not");
    value = used.get<SimulatedGenerator>()->inner;
  }
  at::native::cpu_fallback(op, stack);
}

at::Tensor& add_in_place(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (self.device() != other.device() || self.sizes() != other.sizes() || self.dtype() != other.dtype()) {
    return at::native::call_fallback_fn<&fallback, at::_ops::add__Tensor>::call(self, other, alpha);
  }
  if (self.numel()) {
    push(current_stream(self.device()), [to = on_host(self), by = on_host(other), alpha]() mutable {
      to.add_(by, alpha);
    });
  }
  return self;
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      self, std::move(storage), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) { return at::native::set_(self, storage); }

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

void record_stream(at::Tensor& self, Stream stream) { device_memory.recordStream(self.storage().data_ptr(), stream); }

// ----------------------------------------------------------------------------------------------------------- the knobs

void configure(int64_t seed, int64_t most_microseconds, bool careful_host, bool poison) {
  for (DeviceIndex device = 0; device < DEVICES; ++device) synchronize_device(device);
  Machine& m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  m.most_microseconds = most_microseconds;
  m.careful_host = careful_host;
  m.poison = poison;
  for (DeviceIndex device = 0; device < DEVICES; ++device) {
    for (StreamId id = 0; id < STREAMS; ++id) draw_pace(m.lines[device][id], seed, device, id);
  }
}

void hold(int64_t device, int64_t stream, bool held) {
  Machine& m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  line_of(stream_of(device, stream)).held = held;
  m.changed.notify_all();
}

void before_fork() {
  cache().mutex.lock();
  machine().mutex.lock();
}

void after_fork() {
  machine().mutex.unlock();
  cache().mutex.unlock();
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  pthread_atfork(before_fork, after_fork, after_fork);
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("fill_.Scalar", fill_scalar);
  m.impl("zero_", zero);
  m.impl("add_.Tensor", add_in_place);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {  // enough to bring one there and back
  m.impl("empty.memory_format", at::native::empty_sparse_symint);
  m.impl("copy_", at::native::copy_sparse_wrapper_);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
}

TORCH_LIBRARY(simulated, m) {
  m.def("configure(int seed, int most_microseconds, bool careful_host, bool poison) -> ()", configure);
  m.def("hold(int device, int stream, bool held) -> ()", hold);
  m.def("in_fork() -> bool", in_fork);
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) {
    return at::Tensor(default_generator(device).unsafeGetGeneratorImpl()->get_state());
  });
  m.def("set_rng_state(Tensor state, int device) -> ()", [](const at::Tensor& state, int64_t device) {
    default_generator(device).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
  });
  m.def("manual_seed(int seed, int device) -> ()", [](int64_t seed, int64_t device) {
    default_generator(device).set_current_seed(seed);
  });
}
