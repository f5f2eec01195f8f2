// SPDX-License-Identifier: MIT
#include "collectives_impl.hpp"
#include "words.hpp"
#include "world/fail_together.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

namespace bellows {

const MessageBuffer* CollectiveContext::linked(const BufferView& view) const noexcept {
    const auto at = std::ranges::find(linked_tensors, view.resource, &LinkedTensors::resource);
    return at != linked_tensors.end() ? &at->memory : nullptr;
}

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
    TimePoint post(const char* what, bool linked, std::vector<DeclaredAccess> accesses,
                   std::size_t num_chunks, const CollectiveJob::MakeChunk& make);
    void check_apart(const char* what, const CollectiveTensors& tensors,
                     const MovePlan& plan) const;
    TimePoint move(const char* what, const TensorView& source, const TensorView& target,
                   std::span<const MemoryMove> moves, bool sums);
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
    const BufferView source = words_around(tensors.source, 0, tensors.source.bytes);
    const BufferView target = words_around(tensors.target, 0, tensors.target.bytes);
    std::vector<DeclaredAccess> accesses;
    if (source && !writes_source)
        accesses.push_back({source, Access::Read});
    if (target)
        accesses.push_back({target, Access::ReadWrite});
    const bool by_link = linked(bytes);
    return post(what, by_link, std::move(accesses), plans.size(),
                [&](StagingSlot& slot, std::size_t index, std::uint64_t sequence,
                    std::uint32_t first_stream) {
                    return std::make_unique<ChunkTransfer>(*context, slot, by_link, tensors,
                                                           std::move(plans[index]), sequence,
                                                           first_stream);
                });
}

TimePoint Collectives::Impl::post(const char* what, bool linked,
                                  std::vector<DeclaredAccess> accesses, std::size_t num_chunks,
                                  const CollectiveJob::MakeChunk& make) {
    CollectiveLane& at = lanes[next_lane++ % lanes.size()];
    LaneJob job;
    job.name = context->options.name + " " + what;
    job.accesses = std::move(accesses);
    auto work =
        std::make_shared<CollectiveJob>(context, at.slots, linked, job.name, num_chunks, make);
    job.on_failure = tell_all(context->transport.control());
    job.step = [work](LaneContext& lane) { return work->step(lane); };
    job.timeout = std::chrono::hours{24}; // CollectiveJob::watch has the limit that counts
    return at.lane.post(std::move(job));
}

namespace {

BufferView bytes_of(const TensorView& tensor) {
    return tensor.num_bytes() > 0 ? tensor.buffer.sub(0, tensor.num_bytes()) : BufferView{};
}

bool overlap(const BufferView& a, const BufferView& b) {
    return a && b && a.resource == b.resource && a.offset < b.offset + b.bytes &&
           b.offset < a.offset + a.bytes;
}

} // namespace

/// That this rank's ranges lie in its tensors, and that it gives nothing of what it gets.
void Collectives::Impl::check_apart(const char* what, const CollectiveTensors& tensors,
                                    const MovePlan& plan) const {
    const auto within = [&](const char* name, const BufferView& view, std::uint64_t first,
                            std::uint64_t bytes) {
        require(bytes <= view.bytes && first <= view.bytes - bytes, what,
                std::to_string(bytes) + " bytes at byte " + std::to_string(first) + " of this " +
                    "rank's " + name + ", which has " + std::to_string(view.bytes));
    };
    const bool shared = overlap(tensors.source, tensors.target);
    std::map<std::uint64_t, std::uint64_t> taken; // end by begin, in the memory that they share
    for (const MoveTarget& at : plan.targets)
        if (at.to == context->self()) {
            within("target", tensors.target, at.to_byte, at.bytes);
            if (shared)
                taken.emplace(tensors.target.offset + at.to_byte,
                              tensors.target.offset + at.to_byte + at.bytes);
        }
    for (const MoveTarget& at : plan.targets)
        for (const MoveTerm& term : at.terms)
            if (term.from == context->self()) {
                within("source", tensors.source, term.from_byte, at.bytes);
                const std::uint64_t begin = tensors.source.offset + term.from_byte;
                const auto behind = taken.lower_bound(begin + at.bytes);
                require(behind == taken.begin() || std::prev(behind)->second <= begin, what,
                        std::to_string(at.bytes) + " bytes at byte " +
                            std::to_string(term.from_byte) +
                            " of this rank's source are among those that its target gets");
            }
}

TimePoint Collectives::Impl::move(const char* what, const TensorView& source,
                                  const TensorView& target, std::span<const MemoryMove> moves,
                                  bool sums) {
    check(what, "source", source, sums);
    check(what, "target", target, sums);
    const CollectiveTensors tensors{bytes_of(source), bytes_of(target), false};
    require(tensors.source.offset % kWordBytes == 0 && tensors.target.offset % kWordBytes == 0,
            what, "source and target must begin at multiples of 4 bytes");
    std::uint64_t bytes = 0; // of all moves: the same on all members
    for (const MemoryMove& move : moves)
        bytes += move.bytes;
    const MovePlan plan =
        plan_moves(limits(bytes), moves, sums, context->options.name + " " + what);
    check_apart(what, tensors, plan);
    std::vector<DeclaredAccess> accesses;
    if (overlap(tensors.source, tensors.target)) {
        const std::uint64_t begin = std::min(tensors.source.offset, tensors.target.offset);
        const std::uint64_t end = std::max(tensors.source.offset + tensors.source.bytes,
                                           tensors.target.offset + tensors.target.bytes);
        accesses.push_back({{tensors.source.resource, begin, end - begin}, Access::ReadWrite});
    } else {
        if (tensors.source)
            accesses.push_back(
                {words_around(tensors.source, 0, tensors.source.bytes), Access::Read});
        if (tensors.target)
            accesses.push_back(
                {words_around(tensors.target, 0, tensors.target.bytes), Access::ReadWrite});
    }
    const bool by_link = linked(bytes);
    return post(what, by_link, std::move(accesses), plan.chunks.size(),
                [&](StagingSlot& slot, std::size_t index, std::uint64_t sequence,
                    std::uint32_t first_stream) {
                    return std::make_unique<MoveTransfer>(*context, slot, by_link, tensors, plan,
                                                          plan.chunks[index], sums, sequence,
                                                          first_stream);
                });
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

TimePoint Collectives::move(const TensorView& source, const TensorView& target,
                            std::span<const MemoryMove> moves) {
    return impl_->together([&] { return impl_->move("MOVE", source, target, moves, false); });
}

TimePoint Collectives::sum_moves(const TensorView& source, const TensorView& target,
                                 std::span<const MemoryMove> moves) {
    return impl_->together([&] { return impl_->move("SUM_MOVES", source, target, moves, true); });
}

CollectivesStats Collectives::stats() const {
    const std::scoped_lock lock(impl_->context->stats_mutex);
    return impl_->context->stats;
}

} // namespace bellows
