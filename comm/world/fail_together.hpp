// SPDX-License-Identifier: MIT
#pragma once

// How a failure on one rank becomes the same failure on all: whatever ends a rank's part of a
// collective, on the caller's thread or on a lane, ends the job through the control plane, since
// the others would wait for this rank until their time limits. And how an error that comes from
// elsewhere says what this rank was in the middle of.

#include <bellows/comm/control_plane.hpp>
#include <bellows/engine/device.hpp>

#include <functional>
#include <new>
#include <string>

namespace bellows {

/// This rank's part of a call that `members` ranks make together. What it throws they all get; with
/// one member nobody else is concerned.
template <class Call>
auto fail_together(ControlPlane& control, std::uint64_t members, const Call& call) {
    try {
        return call();
    } catch (const Error& error) {
        if (members > 1)
            control.abort(error);
        throw;
    } catch (const std::bad_alloc&) {
        const Error error(ErrorCode::OutOfMemory, "no host memory left to hand in a collective");
        if (members > 1)
            control.abort(error);
        throw error;
    }
}

/// For LaneJob::on_failure: the job's error becomes every rank's. control must outlive it.
std::function<void(const Error&)> tell_all(ControlPlane& control);

/// The job's failure ends the device's work, with what this rank was in the middle of; for as long
/// as the subscription lives. Both must outlive it.
[[nodiscard]] ControlPlane::Subscription abort_on_failure(ControlPlane& control, Device& device);

/// error, and behind it what this rank was doing when it came; unchanged if it says that already.
Error meanwhile(const Error& error, int rank, const std::string& doing);

} // namespace bellows
