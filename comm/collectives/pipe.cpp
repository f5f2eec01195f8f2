// SPDX-License-Identifier: MIT
#include "pipe_wire.hpp"
#include "transport/link_transfer.hpp"
#include "transport/trace_transfer.hpp"
#include "words.hpp"
#include "world/fail_together.hpp"

#include <bellows/base/error.hpp>
#include <bellows/comm/pipe.hpp>
#include <bellows/engine/recording.hpp>

#include <cstring>
#include <deque>
#include <map>
#include <utility>

namespace bellows {

namespace {

using Clock = std::chrono::steady_clock;

/// What the jobs of a pipe share; lives as long as the last of them.
struct Context {
    Context(Device& owner, Transport& transport, PipeOptions chosen)
        : device(owner), options(std::move(chosen)), rank(transport.rank()),
          control(transport.control()),
          wire(
              transport, owner.info().is_cpu,
              [this](const Error& error) {
                  if (auto tell = tell_all(control))
                      tell(error);
                  device.abort(control.with_activities(error));
              },
              [this](const PipeMessage& message) {
                  trace_transfer(device, options.name, message.transfer);
              }) {
        if (DeviceLink* const linked = transport.device_link()) {
            link = linked;
            pool = std::make_unique<LinkPool>(device, *linked, options.name + " blocks");
        }
    }

    Device& device;
    PipeOptions options;
    int rank = 0;
    ControlPlane& control;
    std::mutex stats_mutex;
    PipeStats stats;
    DeviceLink* link = nullptr;
    std::unique_ptr<LinkPool> pool;
    PipeWire wire; // last: its thread uses the others

    std::string name(const char* what, int peer) const {
        return options.name + " " + what + " " + std::to_string(peer);
    }
    /// Whether a message goes from device to device. Both ends say the same.
    bool linked(const PipeMessage& message) const noexcept {
        return link != nullptr && link->reaches(message.peer) && message.bytes > 0 &&
               message.bytes % kWordBytes == 0;
    }
    QueueRole role_of(const PipeMessage& message, QueueRole to_host) const noexcept {
        return role_of_copies(device, linked(message), to_host);
    }
    /// Memory of `bytes` bytes for a message of so many or fewer.
    void bind(PipeMessage& message, std::uint64_t bytes) const {
        if (!linked(message)) {
            message.staging.bind(bytes);
            return;
        }
        message.block = pool->take(bytes);
        message.staging.bind(message.block->memory);
    }
    Buffer declare(const char* what, int peer) const {
        return Buffer::declare(device, {.name = name(what, peer),
                                        .kind = MemoryKind::Readback,
                                        .category = MemoryCategory::Communication});
    }
};

/// The messages of an edge that were asked for and have not been taken, oldest first. Only the
/// first few have memory and may arrive.
class Arrivals {
public:
    explicit Arrivals(std::shared_ptr<Context> context) : context_(std::move(context)) {}

    void expect(PipeMessagePtr message) {
        const std::scoped_lock lock(mutex_);
        waiting_.push_back(std::move(message));
        admit();
    }
    /// The oldest has been taken.
    void take() {
        const std::scoped_lock lock(mutex_);
        waiting_.pop_front();
        admit();
    }

private:
    void admit() {
        if (context_->wire.stopping()) // nothing more comes, and the transport may be gone
            return;
        const std::size_t most =
            std::min<std::size_t>(waiting_.size(), context_->options.receives_ahead);
        for (std::size_t i = 0; i < most; ++i) {
            PipeMessagePtr& message = waiting_[i];
            if (message->state.load() != PipeMessage::State::New)
                continue;
            if (message->bytes > 0)
                context_->bind(*message, whole_words(message->bytes));
            context_->wire.post(message);
        }
    }

    std::shared_ptr<Context> context_;
    std::mutex mutex_;
    std::deque<PipeMessagePtr> waiting_;
};

// The jobs record their copies when they are made, while the caller's tensor is sure to be there;
// the staging memory that the recordings name is bound when it is needed.

/// Copies a ready tensor to where its message leaves from, and hands that to the wire.
class SendJob {
public:
    SendJob(std::shared_ptr<Context> context, PipeMessagePtr message, const BufferView& x)
        : context_(std::move(context)), message_(std::move(message)) {
        if (message_->bytes == 0)
            return;
        // Only whole words can be copied: where x begins inside one, the message is moved down.
        const BufferView words = words_around(x, 0, message_->bytes);
        lead_ = x.offset - words.offset;
        bytes_ = words.bytes;
        message_->staging = context_->declare("to", message_->peer);
        copy_ = std::make_unique<Recording>(context_->device,
                                            context_->role_of(*message_, QueueRole::TransferOut),
                                            context_->name("to", message_->peer));
        copy_->copy(words, message_->staging.view().sub(0, words.bytes));
    }

    Progress step(LaneContext& lane) {
        if (bytes_ > 0 && !message_->staging.bound()) {
            context_->bind(*message_, bytes_);
            copied_ = lane.submit(*copy_);
            copied_since_ = Clock::now();
            lane.phase("copy from the device");
        }
        if (!copied_.reached()) {
            // Within the device it takes no longer than a nap.
            const bool soon = message_->block && !context_->device.info().is_cpu &&
                              Clock::now() - copied_since_ < std::chrono::milliseconds(1);
            return soon ? Progress::Soon : Progress::Again;
        }
        message_->first_byte = lead_;
        if (lead_ > 0 && !message_->block) {
            auto* data = message_->staging.mapped_as<std::byte>().data();
            std::memmove(data, data + lead_, message_->bytes);
        }
        context_->wire.post(message_);
        const std::scoped_lock lock(context_->stats_mutex);
        ++context_->stats.messages_sent;
        context_->stats.bytes_sent += message_->bytes;
        return Progress::Done;
    }

private:
    std::shared_ptr<Context> context_;
    PipeMessagePtr message_;
    std::uint64_t lead_ = 0, bytes_ = 0;
    std::unique_ptr<Recording> copy_; // gone before the staging that it names
    TimePoint copied_;
    Clock::time_point copied_since_{};
};

/// Waits for a message and copies it into its tensor.
class ReceiveJob {
public:
    ReceiveJob(std::shared_ptr<Context> context, std::shared_ptr<Arrivals> arrivals,
               PipeMessagePtr message, const BufferView& x)
        : context_(std::move(context)), arrivals_(std::move(arrivals)),
          message_(std::move(message)), tail_(message_->bytes % kWordBytes) {
        if (message_->bytes == 0)
            return;
        const std::string name = context_->name("from", message_->peer);
        const BufferView words = words_around(x, 0, message_->bytes);
        message_->staging = context_->declare("from", message_->peer);
        copy_ = std::make_unique<Recording>(
            context_->device, context_->role_of(*message_, QueueRole::TransferIn), name);
        copy_->copy(message_->staging.view().sub(0, words.bytes), words);
        if (tail_ == 0)
            return;
        tail_word_ = Buffer(context_->device, {.name = name + ", last word",
                                               .bytes = kWordBytes,
                                               .kind = MemoryKind::Readback,
                                               .category = MemoryCategory::Communication});
        copy_tail_ = std::make_unique<Recording>(context_->device, QueueRole::TransferOut,
                                                 name + ", last word");
        copy_tail_->copy(words.sub(words.bytes - kWordBytes, kWordBytes), tail_word_.view());
    }

    Progress step(LaneContext& lane) {
        if (began_ == Clock::time_point{}) {
            began_ = Clock::now();
            lane.phase("waits for the message");
            activity_ = context_->control.begin_activity([this] { return describe(); });
            if (copy_tail_) // what stands behind the tensor in its last word is to stay
                tail_copied_ = lane.submit(*copy_tail_);
        }
        try {
            if (!arrived() || !tail_copied_.reached())
                return Progress::Again;
            finish(lane);
            return Progress::Done;
        } catch (const Error& error) {
            if (!context_->control.failed())
                throw;
            throw context_->control.with_activities(error);
        }
    }

private:
    /// Any thread.
    std::string describe() const {
        const bool there = message_->state.load() == PipeMessage::State::Done;
        return "'" + context_->name("RECV from", message_->peer) + "', message " +
               std::to_string(message_->tag.sequence) + " of " + std::to_string(message_->bytes) +
               " bytes from rank " + std::to_string(message_->peer) +
               (there ? " is there" : " has not arrived");
    }

    bool arrived() const {
        const auto state = message_->state.load(std::memory_order_acquire);
        if (state == PipeMessage::State::Done)
            return true;
        if (state == PipeMessage::State::Failed)
            throw Error(*message_->error);
        const auto waited = Clock::now() - began_;
        if (waited > context_->options.timeout)
            throw Error(ErrorCode::Timeout,
                        context_->options.name + ": rank " + std::to_string(context_->rank) +
                            " waited " + std::to_string(waited / std::chrono::milliseconds(1)) +
                            " ms for message " + std::to_string(message_->tag.sequence) + " of " +
                            std::to_string(message_->bytes) + " bytes from rank " +
                            std::to_string(message_->peer),
                        message_->peer);
        return false;
    }

    void finish(LaneContext& lane) {
        lane.phase("copy to the device");
        const double waited = std::chrono::duration<double>(Clock::now() - began_).count();
        if (copy_tail_)
            std::memcpy(message_->staging.mapped_as<std::byte>().data() + message_->bytes,
                        tail_word_.mapped_as<std::byte>().data() + tail_, kWordBytes - tail_);
        if (copy_)
            lane.submit(*copy_);
        arrivals_->take();
        const std::scoped_lock lock(context_->stats_mutex);
        ++context_->stats.messages_received;
        context_->stats.bytes_received += message_->bytes;
        context_->stats.seconds_waited += waited;
    }

    std::shared_ptr<Context> context_;
    std::shared_ptr<Arrivals> arrivals_;
    PipeMessagePtr message_;
    std::uint64_t tail_ = 0; ///< bytes in the last word if it is not whole
    Buffer tail_word_;
    std::unique_ptr<Recording> copy_tail_, copy_; // gone before the memory that they name
    TimePoint tail_copied_;
    Clock::time_point began_{};
    ControlPlane::Activity activity_; // last: it calls describe()
};

struct Edge {
    Lane lane;
    std::shared_ptr<Arrivals> arrivals; ///< of a receiving edge
    std::uint64_t next = 0;             ///< message
    TimePoint last;
};

} // namespace

struct Pipe::Impl {
    std::shared_ptr<Context> context;
    HostThread& thread;
    int world_size = 0;
    ControlPlane::Subscription on_failure;
    std::map<int, Edge> out, in;

    std::uint64_t members() const noexcept { return static_cast<std::uint64_t>(world_size); }
    Edge& edge(Direction direction, int peer);
    void check(const char* what, int peer, const TensorView& x) const;
    template <class Job>
    TimePoint post(Edge& edge, std::string name, const BufferView& x, Access access,
                   std::shared_ptr<Job> work);
};

Edge& Pipe::Impl::edge(Direction direction, int peer) {
    const bool sends = direction == Direction::Send;
    auto& edges = sends ? out : in;
    const auto found = edges.find(peer);
    if (found != edges.end())
        return found->second;
    Edge made{thread.add_lane(context->name(sends ? "to" : "from", peer)),
              sends ? nullptr : std::make_shared<Arrivals>(context),
              0,
              {}};
    return edges.emplace(peer, std::move(made)).first->second;
}

void Pipe::Impl::check(const char* what, int peer, const TensorView& x) const {
    const std::string name = context->name(what, peer);
    if (peer < 0 || peer >= world_size)
        throw Error(ErrorCode::InvalidArgument,
                    name + ": there are " + std::to_string(world_size) + " ranks");
    if (!x.is_contiguous() || (x.num_bytes() > 0 && x.buffer.bytes < x.num_bytes()))
        throw Error(ErrorCode::InvalidArgument,
                    name + ": the tensor must be contiguous and have its memory");
}

template <class Job>
TimePoint Pipe::Impl::post(Edge& edge, std::string name, const BufferView& x, Access access,
                           std::shared_ptr<Job> work) {
    LaneJob job;
    job.name = std::move(name);
    if (const BufferView words = words_around(x, 0, x.bytes))
        job.accesses.push_back({words, access});
    job.step = [work = std::move(work)](LaneContext& lane) { return work->step(lane); };
    job.on_failure = tell_all(context->control);
    job.timeout = context->options.timeout + std::chrono::hours{1}; // the job's own comes first
    edge.last = edge.lane.post(std::move(job));
    return edge.last;
}

Pipe::Pipe(Device& device, World& world, Transport& transport, HostThread& thread,
           PipeOptions options)
    : impl_(new Impl{nullptr, thread, world.size(), {}, {}, {}}) {
    if (options.receives_ahead == 0)
        throw Error(ErrorCode::InvalidArgument, options.name + ": receives_ahead is 0");
    impl_->context = std::make_shared<Context>(device, transport, std::move(options));
    impl_->on_failure = abort_on_failure(world.control(), device);
}

Pipe::~Pipe() {
    constexpr std::chrono::seconds kMost{10};
    const auto deadline = Clock::now() + kMost;
    const auto left = [&] {
        return std::max(
            std::chrono::milliseconds{0},
            std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
    };
    for (auto& [peer, edge] : impl_->out) {
        try {
            edge.last.wait(left());
        } catch (const Error&) {
            // Whoever waits for the send itself gets the error.
        }
    }
    impl_->context->wire.stop(left());
}

TimePoint Pipe::send(int peer, const TensorView& x) {
    return fail_together(impl_->context->control, impl_->members(), [&] {
        impl_->check("to", peer, x);
        Edge& edge = impl_->edge(Direction::Send, peer);
        const BufferView bytes = x.num_bytes() > 0 ? x.buffer.sub(0, x.num_bytes()) : BufferView{};
        auto message = std::make_shared<PipeMessage>();
        message->direction = Direction::Send;
        message->peer = peer;
        message->tag = {edge.next, 0};
        message->bytes = bytes.bytes;
        auto job = std::make_shared<SendJob>(impl_->context, std::move(message), bytes);
        ++edge.next;
        return impl_->post(edge, impl_->context->name("SEND to", peer), bytes, Access::Read,
                           std::move(job));
    });
}

TimePoint Pipe::recv(int peer, const TensorView& x) {
    return fail_together(impl_->context->control, impl_->members(), [&] {
        impl_->check("from", peer, x);
        if (x.buffer.offset % kWordBytes != 0)
            throw Error(ErrorCode::InvalidArgument,
                        impl_->context->name("from", peer) + ": the tensor begins at byte " +
                            std::to_string(x.buffer.offset) + ", not at a multiple of 4");
        Edge& edge = impl_->edge(Direction::Receive, peer);
        const BufferView bytes = x.num_bytes() > 0 ? x.buffer.sub(0, x.num_bytes()) : BufferView{};
        auto message = std::make_shared<PipeMessage>();
        message->direction = Direction::Receive;
        message->peer = peer;
        message->tag = {edge.next, 0};
        message->bytes = bytes.bytes;
        auto job = std::make_shared<ReceiveJob>(impl_->context, edge.arrivals, message, bytes);
        ++edge.next;
        edge.arrivals->expect(std::move(message));
        return impl_->post(edge, impl_->context->name("RECV from", peer), bytes,
                           bytes.bytes % kWordBytes == 0 ? Access::Write : Access::ReadWrite,
                           std::move(job));
    });
}

PipeStats Pipe::stats() const {
    const std::scoped_lock lock(impl_->context->stats_mutex);
    return impl_->context->stats;
}

} // namespace bellows
