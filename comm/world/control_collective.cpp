// SPDX-License-Identifier: MIT

// Barrier and agreement over the control plane's messages: everyone reports to rank 0, which
// answers everyone. Rank 0 is the one that can say who is missing, so its verdict is what all ranks
// throw.

#include "control_plane_impl.hpp"
#include "fail_together.hpp"

namespace bellows {
namespace {

constexpr std::uint64_t kCollectiveTag = std::uint64_t{1} << 63;
constexpr std::chrono::milliseconds kAnswerGrace{500};

// What travels: nothing, an error that a rank brought, or the failure of the collective itself.
enum class Verdict : std::uint8_t { Clear, Brought, Broken };

std::vector<std::byte> encode(Verdict verdict, const std::optional<Error>& error) {
    std::vector<std::byte> bytes{static_cast<std::byte>(verdict)};
    if (error) {
        const std::vector<std::byte> rest = encode_error(*error);
        bytes.insert(bytes.end(), rest.begin(), rest.end());
    }
    return bytes;
}

std::optional<Error> decode(std::span<const std::byte> bytes, int from) {
    const auto verdict = bytes.empty() ? Verdict::Broken : static_cast<Verdict>(bytes[0]);
    if (verdict == Verdict::Clear)
        return std::nullopt;
    Error error = decode_error(bytes.subspan(std::min<std::size_t>(1, bytes.size())), from);
    if (verdict == Verdict::Broken)
        throw error;
    return error;
}

std::optional<Error> worse(std::optional<Error> a, const std::optional<Error>& b) {
    return b && (!a || severity(b->code()) > severity(a->code())) ? b : a;
}

Error missing_error(std::string_view name, ControlPlane::Milliseconds timeout,
                    const std::vector<int>& missing) {
    std::string text = "rank 0 waited " + std::to_string(timeout.count()) + " ms in '" +
                       std::string(name) + "' for rank";
    for (const int rank : missing)
        text += " " + std::to_string(rank);
    return Error(ErrorCode::Timeout, text, missing.front());
}

} // namespace

void ControlPlane::barrier(Milliseconds timeout, std::string_view name) {
    agree(std::nullopt, timeout, name);
}

std::optional<Error> ControlPlane::agree(const std::optional<Error>& mine, Milliseconds timeout,
                                         std::string_view name) {
    const std::lock_guard collective(impl_->collective_mutex);
    const std::uint64_t tag = kCollectiveTag | (2 * impl_->collective_sequence++);
    const std::uint64_t answer_tag = tag + 1;
    std::optional<Error> own = mine;
    if (own && own->rank() < 0)
        own = Error(own->code(), own->message(), rank(), own->detail());

    if (rank() != 0) {
        impl_->send(0, tag, encode(own ? Verdict::Brought : Verdict::Clear, own), {});
        try {
            return decode(impl_->receive(0, answer_tag, timeout + kAnswerGrace).bytes, 0);
        } catch (const Error& error) {
            if (failed())
                throw meanwhile(error, rank(),
                                "'" + std::string(name) + "', waiting for rank 0's answer");
            if (error.code() != ErrorCode::Timeout || error.rank() != 0)
                throw;
            throw Error(ErrorCode::Timeout,
                        "rank " + std::to_string(rank()) + " waited " +
                            std::to_string((timeout + kAnswerGrace).count()) + " ms in '" +
                            std::string(name) + "' for rank 0's answer",
                        0);
        }
    }

    const Deadline deadline(timeout);
    std::vector<int> missing;
    std::optional<Error> broken;
    int came = 1;
    for (int peer = 1; peer < size(); ++peer) {
        try {
            own = worse(std::move(own),
                        decode(impl_->receive(peer, tag, deadline.remaining()).bytes, peer));
            ++came;
        } catch (const Error& error) {
            if (error.code() == ErrorCode::Timeout && !failed())
                missing.push_back(peer);
            else
                broken = worse(std::move(broken), error);
        }
    }
    if (!missing.empty() && !broken)
        broken = missing_error(name, timeout, missing);
    const std::vector<std::byte> answer =
        broken ? encode(Verdict::Broken, broken)
               : encode(own ? Verdict::Brought : Verdict::Clear, own);
    for (int peer = 1; peer < size(); ++peer) {
        try {
            impl_->send(peer, answer_tag, answer, {});
        } catch (const Error& error) { // a peer that left gets no answer; the others must
            broken = worse(std::move(broken), error);
        }
    }
    if (broken && failed())
        throw meanwhile(*broken, rank(),
                        "'" + std::string(name) + "', " + std::to_string(came) + " of " +
                            std::to_string(size()) + " ranks had come");
    if (broken)
        throw *broken;
    return own;
}

} // namespace bellows
