// SPDX-License-Identifier: MIT
#pragma once

// What a rank is doing, for the messages of those who lose it; and a limit for work that nothing
// else can end: a call of MPI or of a driver that never returns. When it is over, a thread ends the
// process.

#include <chrono>
#include <functional>
#include <string>

namespace bellows {

/// From now on this rank does `phase` ("in step 12", "while closing"), which is what messages say
/// of it; our launcher, if there is one, is told. A limit above 0 ends the process with exit code 4
/// and a message, unless the next phase begins before; our launcher, which can tell more about the
/// other ranks, ends the job some seconds earlier. One per process. detail, if given, is called
/// when the limit is over, from another thread; what it returns stands behind the message.
void begin_phase(int rank, const std::string& phase, std::chrono::milliseconds limit = {},
                 std::function<std::string()> detail = {});

} // namespace bellows
