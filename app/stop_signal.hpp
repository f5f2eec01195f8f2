// SPDX-License-Identifier: MIT
#pragma once

// Signals that ask a run to stop at the end of its step.

namespace bellows {

/// From now on SIGUSR1 to this process makes stop_asked() true. Where no launcher of ours stands
/// above it, SIGINT and SIGTERM do the same, and one of these half a second later ends the process
/// at once. For the main thread, before there are others: all threads leave these signals to one
/// that waits for them.
void watch_stop_signals();

/// From any thread.
bool stop_asked() noexcept;

} // namespace bellows
