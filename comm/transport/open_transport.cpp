// SPDX-License-Identifier: MIT
#include "device_link.hpp"
#include "self_queue.hpp"
#include "transports.hpp"
#include "world/mpi_context.hpp"

#include <limits>

namespace bellows {
namespace {

class SingleTransport final : public Transport {
public:
    explicit SingleTransport(World& world) : Transport(world), self_(world.rank()) {}

    std::string_view name() const noexcept override { return "self"; }
    Transfer post_send(int peer, Tag tag, std::span<const std::byte> bytes) override {
        require(peer, tag);
        return self_.post_send(tag, bytes);
    }
    Transfer post_recv(int peer, Tag tag, std::span<std::byte> bytes) override {
        require(peer, tag);
        return self_.post_recv(tag, bytes);
    }
    void progress() override { control().throw_if_failed(); }

private:
    SelfQueue self_;
};

} // namespace

std::unique_ptr<Transport> open_transport(World& world, const TransportOptions& options) {
    if (options.max_message_bytes < 1 ||
        options.max_message_bytes > static_cast<std::uint64_t>(std::numeric_limits<int>::max()))
        throw Error(ErrorCode::InvalidArgument, "max_message_bytes is " +
                                                    std::to_string(options.max_message_bytes) +
                                                    "; MPI takes 1 to 2147483647");
    if (!world.impl().mpi)
        return std::make_unique<SingleTransport>(world);
    auto transport = make_node_transport(world, options, make_mpi_transport(world, options));
    transport->device_link_ = make_device_link(world, options, transport->why_no_device_link_);
    return transport;
}

} // namespace bellows
