// SPDX-License-Identifier: MIT
// The program `bellows`: which subcommands there are.
#include "app/commands.hpp"

int main(int argc, char** argv) {
    return bellows::run_command_line(argc, argv, bellows::Commands{});
}
