// SPDX-License-Identifier: MIT
#include "collectives_impl.hpp"
#include "words.hpp"
#include "world/fail_together.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

namespace bellows {

using Clock = std::chrono::steady_clock;

const MessageBuffer* CollectiveContext::linked(const BufferView& view) const noexcept {
    const auto at = std::ranges::find(linked_tensors, view.resource, &LinkedTensors::resource);
    return at != linked_tensors.end() ? &at->memory : nullptr;
}

// ---- The job -----------------------------------------------------------------------------------

CollectiveJob::CollectiveJob(std::shared_ptr<CollectiveContext> context,
                             std::shared_ptr<StagingSlots> slots, bool linked, std::string name,
                             CollectiveTensors tensors, std::vector<ChunkPlan> plans)
    : context_(std::move(context)), slots_(std::move(slots)), linked_(linked),
      name_(std::move(name)), tensors_(tensors), plans_(std::move(plans)) {
    const std::uint64_t sequence = context_->transport.next_sequence();
    std::vector<StagingSlot>& in_turn = linked_ ? slots_->linked : slots_->host;
    for (std::size_t i = 0; i < plans_.size(); ++i)
        chunks_.push_back(std::make_unique<ChunkTransfer>(
            *context_, in_turn[i % in_turn.size()], linked_, tensors_, plans_[i], sequence, i));
    next_.resize(in_turn.size());
    std::iota(next_.begin(), next_.end(), std::size_t{0});
}

void CollectiveJob::finish(const ChunkTransfer& chunk) {
    stats_.bytes_sent += chunk.stats().bytes_sent;
    stats_.bytes_received += chunk.stats().bytes_received;
    stats_.messages_sent += chunk.stats().messages_sent;
    events_of_ended_ += chunk.num_events();
}

/// Counts the time in which only the network could go on, and ends a wait that takes too long.
void CollectiveJob::watch(std::uint64_t num_events) {
    const auto now = Clock::now();
    const ChunkTransfer* waiting = nullptr;
    bool only_network = true;
    for (const std::size_t at : next_) {
        if (at >= chunks_.size())
            continue;
        if (chunks_[at]->waits_for_network())
            waiting = waiting ? waiting : chunks_[at].get();
        else
            only_network = false;
    }
    const bool waits = waiting != nullptr && only_network && last_step_ != TimeOfDay{};
    if (waits)
        stats_.seconds_waited += std::chrono::duration<double>(now - last_step_).count();
    if (!waits || num_events != last_events_)
        last_progress_ = now;
    last_step_ = now;
    last_events_ = num_events;
    if (waiting != nullptr && now - last_progress_ > context_->options.timeout)
        throw timeout_error(
            context_->transport, waiting->transfers(), name_ + ": " + waiting->phase_name(),
            std::chrono::duration_cast<std::chrono::milliseconds>(now - last_progress_));
}

/// Whether the slot has work left after all that could be done now.
bool CollectiveJob::step_slot(std::size_t slot, LaneContext& lane) {
    for (; next_[slot] < chunks_.size(); next_[slot] += next_.size()) {
        ChunkTransfer& chunk = *chunks_[next_[slot]];
        if (!chunk.step(lane))
            return true;
        finish(chunk);
        chunks_[next_[slot]].reset();
    }
    return false;
}

Progress CollectiveJob::step(LaneContext& lane) {
    ControlPlane& control = context_->transport.control();
    if (!began_) {
        began_ = true;
        activity_ = control.begin_activity([this] { return describe(); });
    }
    try {
        const std::scoped_lock lock(mutex_);
        return advance(lane);
    } catch (const Error& error) {
        if (control.failed())
            throw control.with_activities(error);
        if (error.code() == ErrorCode::Timeout)
            throw;
        throw Error(error.code(),
                    "rank " + std::to_string(control.rank()) + ": " + describe() + ": " +
                        error.message(),
                    error.rank(), error.detail());
    }
}

/// Any thread. Does not wait for long: a step may stand in a driver.
std::string CollectiveJob::describe() const {
    const std::unique_lock lock(mutex_, std::chrono::seconds(1));
    if (!lock)
        return "'" + name_ + "', within a step";
    const ChunkTransfer* at = nullptr;
    std::size_t open = 0;
    for (const std::size_t next : next_)
        for (std::size_t i = next; i < chunks_.size(); i += next_.size()) {
            ++open;
            if (i == next &&
                (at == nullptr || (chunks_[i]->waits_for_network() && !at->waits_for_network())))
                at = chunks_[i].get();
        }
    std::string text = "'" + name_ + (at ? std::string(": ") + at->phase_name() : "") + "', " +
                       std::to_string(chunks_.size() - open) + " of " +
                       std::to_string(chunks_.size()) + " chunks done";
    if (at != nullptr && at->waits_for_network())
        text += ", " + describe_transfers(at->transfers());
    return text;
}

/// From device to device a nap is as long as a chunk's way; not while others let it wait.
bool CollectiveJob::hurries() const {
    return linked_ && !context_->device.info().is_cpu &&
           last_step_ - last_progress_ < std::chrono::milliseconds(5);
}

Progress CollectiveJob::advance(LaneContext& lane) {
    context_->transport.progress();
    bool any = false;
    std::uint64_t num_events = 0;
    for (std::size_t slot = 0; slot < next_.size(); ++slot)
        if (step_slot(slot, lane)) {
            if (!any) // what the first of the chunks under way is at
                lane.phase(chunks_[next_[slot]]->phase_name());
            any = true;
            num_events += chunks_[next_[slot]]->num_events();
        }
    watch(events_of_ended_ + num_events);
    if (any)
        return hurries() ? Progress::Soon : Progress::Again;
    const std::scoped_lock lock(context_->stats_mutex);
    CollectivesStats& all = context_->stats;
    ++all.collectives;
    all.bytes_sent += stats_.bytes_sent;
    all.bytes_received += stats_.bytes_received;
    all.messages_sent += stats_.messages_sent;
    all.seconds_waited += stats_.seconds_waited;
    return Progress::Done;
}

// ---- The interface -----------------------------------------------------------------------------

namespace {

struct CollectiveLane {
    Lane lane;
    std::shared_ptr<StagingSlots> slots;
};

CollectiveLane make_lane(HostThread& thread, const CollectiveContext& context,
                         std::uint32_t index) {
    const std::string name = context.options.name + " " + std::to_string(index);
    const auto declare = [&](const std::string& what, MemoryKind kind) {
        return Buffer::declare(
            context.device,
            {.name = name + what, .kind = kind, .category = MemoryCategory::Communication});
    };
    auto slots = std::make_shared<StagingSlots>();
    for (std::uint32_t i = 0; i < context.options.chunks_in_flight; ++i) {
        slots->host.push_back({{nullptr, declare(" image", MemoryKind::Readback)},
                               {nullptr, declare(" incoming", MemoryKind::Readback)}});
        slots->linked.push_back({{nullptr, declare(" linked image", MemoryKind::Device)},
                                 {nullptr, declare(" linked incoming", MemoryKind::Device)}});
    }
    return {thread.add_lane(name), std::move(slots)};
}

std::string describe(const TensorView& tensor) {
    std::string text = std::string(to_string(tensor.dtype)) + " [";
    for (std::uint32_t i = 0; i < tensor.rank; ++i)
        text += (i == 0 ? "" : ", ") + std::to_string(tensor.extent[i]);
    return text + (tensor.is_contiguous() ? "]" : "], not contiguous");
}

} // namespace

struct Collectives::Impl {
    std::shared_ptr<CollectiveContext> context;
    ControlPlane::Subscription on_failure;
    std::vector<CollectiveLane> lanes;
    std::size_t next_lane = 0;

    void require(bool good, const char* what, const std::string& message) const {
        if (!good)
            throw Error(ErrorCode::InvalidArgument,
                        context->options.name + " " + what + ": " + message);
    }
    /// Whether a collective of so many bytes goes from device to device. All members say the same.
    bool linked(std::uint64_t bytes) const noexcept {
        return context->link != nullptr && bytes > context->options.small_bytes &&
               bytes % kWordBytes == 0;
    }
    PlanLimits limits(std::uint64_t bytes) const noexcept {
        const CollectivesOptions& options = context->options;
        return {context->members(), context->self(),
                linked(bytes) ? options.link_chunk_bytes : options.chunk_bytes,
                options.small_bytes};
    }
    void check(const char* what, const char* name, const TensorView& tensor, bool f32) const;
    std::vector<ByteRange> shares(const char* what, const TensorView& whole, const TensorView& mine,
                                  std::span<const std::uint64_t> counts) const;
    TimePoint post(const char* what, const CollectiveTensors& tensors, std::uint64_t bytes,
                   bool writes_source, std::vector<ChunkPlan> plans);
    /// What a rank refuses or cannot do, all ranks hear of.
    template <class Call>
    TimePoint together(const Call& call) const {
        return fail_together(context->transport.control(), context->members(), call);
    }
};

void Collectives::Impl::check(const char* what, const char* name, const TensorView& tensor,
                              bool f32) const {
    const bool fits = tensor.is_contiguous() && (!f32 || tensor.dtype == DType::F32) &&
                      (tensor.num_elements() == 0 || tensor.buffer.bytes >= tensor.num_bytes());
    require(fits, what,
            std::string(name) + " is " + describe(tensor) + ", wanted is a contiguous " +
                (f32 ? "f32 " : "") + "tensor with its memory");
    require(!f32 || tensor.buffer.offset % 4 == 0, what,
            std::string(name) + " begins at byte " + std::to_string(tensor.buffer.offset) +
                ", not at a multiple of 4");
}

/// Bytes of each member's share of `whole`; `mine` must have this member's size.
std::vector<ByteRange> Collectives::Impl::shares(const char* what, const TensorView& whole,
                                                 const TensorView& mine,
                                                 std::span<const std::uint64_t> counts) const {
    const std::uint64_t members = context->members(), elements = whole.num_elements();
    require(counts.empty() || counts.size() == members, what,
            std::to_string(counts.size()) + " counts for a group of " + std::to_string(members));
    require(mine.dtype == whole.dtype, what,
            "the share is " + describe(mine) + " of a whole " + describe(whole));
    std::vector<ByteRange> shares;
    std::uint64_t first = 0;
    for (std::uint64_t member = 0; member < members; ++member) {
        const std::uint64_t count =
            counts.empty() ? share_of(elements, members, member).count : counts[member];
        require(count <= elements - first, what, "the counts are more than the tensor's elements");
        shares.push_back({first * size_of(whole.dtype), (first + count) * size_of(whole.dtype)});
        first += count;
    }
    require(first == elements, what,
            "the counts sum to " + std::to_string(first) + ", the tensor is " + describe(whole));
    require(mine.num_bytes() == shares[context->self()].size(), what,
            "this rank's share is " + describe(mine) + ", its count is " +
                std::to_string(shares[context->self()].size() / size_of(whole.dtype)));
    return shares;
}

/// bytes: of the whole tensor.
TimePoint Collectives::Impl::post(const char* what, const CollectiveTensors& tensors,
                                  std::uint64_t bytes, bool writes_source,
                                  std::vector<ChunkPlan> plans) {
    CollectiveLane& at = lanes[next_lane++ % lanes.size()];
    LaneJob job;
    job.name = context->options.name + " " + what;
    const BufferView source = words_around(tensors.source, 0, tensors.source.bytes);
    const BufferView target = words_around(tensors.target, 0, tensors.target.bytes);
    if (source && !writes_source)
        job.accesses.push_back({source, Access::Read});
    if (target)
        job.accesses.push_back({target, Access::ReadWrite});
    auto work = std::make_shared<CollectiveJob>(context, at.slots, linked(bytes), job.name, tensors,
                                                std::move(plans));
    job.on_failure = tell_all(context->transport.control());
    job.step = [work](LaneContext& lane) { return work->step(lane); };
    job.timeout = std::chrono::hours{24}; // CollectiveJob::watch has the limit that counts
    return at.lane.post(std::move(job));
}

Collectives::Collectives(Device& device, World& world, Transport& transport, HostThread& thread,
                         Group group, CollectivesOptions options)
    : impl_(std::make_unique<Impl>()) {
    const int position = group.index_of(world.rank());
    impl_->context.reset(
        new CollectiveContext{device, transport, std::move(group), position, std::move(options)});
    const CollectiveContext& c = *impl_->context;
    impl_->require(position >= 0, "set-up",
                   "rank " + std::to_string(world.rank()) + " is not in the group");
    impl_->require(c.group.ranks().back() < world.size(), "set-up",
                   "rank " + std::to_string(c.group.ranks().back()) + " is beyond the world's " +
                       std::to_string(world.size()));
    impl_->require(c.options.chunk_bytes >= 16 && c.options.chunk_bytes <= 1u << 30, "set-up",
                   "chunk_bytes is " + std::to_string(c.options.chunk_bytes) +
                       ", it must be 16 to 2^30");
    impl_->require(c.options.small_bytes <= 1u << 30, "set-up", "small_bytes is over 2^30");
    impl_->require(c.options.chunks_in_flight >= 1 && c.options.chunks_in_flight <= 16, "set-up",
                   "chunks_in_flight must be 1 to 16");
    impl_->require(c.options.collectives_in_flight >= 1 && c.options.collectives_in_flight <= 64,
                   "set-up", "collectives_in_flight must be 1 to 64");
    impl_->require(c.options.link_chunk_bytes >= 16 && c.options.link_chunk_bytes <= 1u << 30,
                   "set-up",
                   "link_chunk_bytes is " + std::to_string(c.options.link_chunk_bytes) +
                       ", it must be 16 to 2^30");
    DeviceLink* const link = transport.device_link();
    if (link != nullptr && link->connects(c.group.ranks()))
        impl_->context->link = link;
    for (std::uint32_t i = 0; i < c.options.collectives_in_flight; ++i)
        impl_->lanes.push_back(make_lane(thread, c, i));
    impl_->on_failure = abort_on_failure(world.control(), device);
}

Collectives::~Collectives() = default;

const Group& Collectives::group() const noexcept {
    return impl_->context->group;
}

int Collectives::position() const noexcept {
    return impl_->context->position;
}

BufferView Collectives::make_memory(std::string name, std::uint64_t bytes,
                                    MemoryCategory category) {
    CollectiveContext& c = *impl_->context;
    if (c.link == nullptr || c.members() == 1)
        return c.tensors
            .emplace_back(c.device,
                          BufferDesc{.name = std::move(name), .bytes = bytes, .category = category})
            .view();
    MessageBuffer memory{c.link->allocate(bytes, c.gone), {}};
    memory.buffer = memory.block->make_buffer(c.device, std::move(name), category);
    const BufferView view = memory.buffer.view().sub(0, bytes);
    c.linked_tensors.push_back({std::move(memory), view.resource});
    return view;
}

void Collectives::use_memory_of(const Collectives& other) {
    CollectiveContext& c = *impl_->context;
    if (c.link == nullptr || c.members() == 1)
        return;
    for (const LinkedTensors& of : other.impl_->context->linked_tensors)
        c.linked_tensors.push_back({{c.link->share(*of.memory.block, c.gone), {}}, of.resource});
}

TimePoint Collectives::all_reduce(const TensorView& x) {
    return impl_->together([&] {
        impl_->check("ALL_REDUCE", "x", x, true);
        const BufferView bytes = x.num_bytes() ? x.buffer.sub(0, x.num_bytes()) : BufferView{};
        return impl_->post("ALL_REDUCE", {bytes, bytes, true}, bytes.bytes, true,
                           plan_all_reduce(impl_->limits(bytes.bytes), x.num_elements()));
    });
}

TimePoint Collectives::reduce_scatter(const TensorView& x, const TensorView& mine,
                                      std::span<const std::uint64_t> counts) {
    return impl_->together([&] {
        impl_->check("REDUCE_SCATTER", "x", x, true);
        impl_->check("REDUCE_SCATTER", "mine", mine, true);
        const auto shares = impl_->shares("REDUCE_SCATTER", x, mine, counts);
        return impl_->post(
            "REDUCE_SCATTER",
            {x.num_bytes() ? x.buffer.sub(0, x.num_bytes()) : BufferView{},
             mine.num_bytes() ? mine.buffer.sub(0, mine.num_bytes()) : BufferView{}, true},
            x.num_bytes(), false, plan_reduce_scatter(impl_->limits(x.num_bytes()), shares));
    });
}

TimePoint Collectives::all_gather(const TensorView& mine, const TensorView& all,
                                  std::span<const std::uint64_t> counts) {
    return impl_->together([&] {
        impl_->check("ALL_GATHER", "mine", mine, false);
        impl_->check("ALL_GATHER", "all", all, false);
        impl_->require(all.buffer.offset % kWordBytes == 0, "ALL_GATHER",
                       "the whole must begin at a multiple of 4 bytes");
        const auto shares = impl_->shares("ALL_GATHER", all, mine, counts);
        const std::uint64_t own_at = all.buffer.offset + shares[impl_->context->self()].begin;
        const bool in_place =
            mine.buffer.resource == all.buffer.resource && mine.buffer.offset == own_at;
        return impl_->post(
            "ALL_GATHER",
            {mine.num_bytes() ? mine.buffer.sub(0, mine.num_bytes()) : BufferView{},
             all.num_bytes() ? all.buffer.sub(0, all.num_bytes()) : BufferView{}, in_place},
            all.num_bytes(), false, plan_all_gather(impl_->limits(all.num_bytes()), shares));
    });
}

TimePoint Collectives::broadcast(int root, const TensorView& x) {
    return impl_->together([&] {
        impl_->check("BROADCAST", "x", x, false);
        impl_->require(root >= 0 && root < group().size(), "BROADCAST",
                       "member " + std::to_string(root) + " of a group of " +
                           std::to_string(group().size()) + " does not exist");
        impl_->require(x.buffer.offset % kWordBytes == 0, "BROADCAST",
                       "the tensor must begin at a multiple of 4 bytes");
        // A gathering to which only the root brings something.
        std::vector<ByteRange> shares;
        for (int member = 0; member < group().size(); ++member)
            shares.push_back(
                {member <= root ? 0 : x.num_bytes(), member < root ? 0 : x.num_bytes()});
        const BufferView bytes = x.num_bytes() ? x.buffer.sub(0, x.num_bytes()) : BufferView{};
        return impl_->post("BROADCAST", {bytes, bytes, true}, bytes.bytes, true,
                           plan_all_gather(impl_->limits(bytes.bytes), shares));
    });
}

CollectivesStats Collectives::stats() const {
    const std::scoped_lock lock(impl_->context->stats_mutex);
    return impl_->context->stats;
}

} // namespace bellows
