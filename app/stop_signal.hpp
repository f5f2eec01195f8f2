// SPDX-License-Identifier: MIT
#pragma once

// Signals that ask a run to stop at the end of its step.

namespace bellows {

/// From now on SIGUSR1 and SIGINT to this process make stop_asked() true, and so does SIGTERM where
/// no launcher of ours stands above it. SIGINT or SIGTERM half a second later ends the process at
/// once. For the main thread, before there are others: all threads leave these signals to one
/// that waits for them.
void watch_stop_signals();

/// From any thread.
bool stop_asked() noexcept;

/// Says on standard error that a signal was heard and what comes of it.
void announce_stop();

} // namespace bellows
