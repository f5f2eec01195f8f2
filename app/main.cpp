// SPDX-License-Identifier: MIT
// The program `bellows`: which subcommands there are.
#include "app/run.hpp"

int main(int argc, char** argv) {
    bellows::Commands commands;
    commands.train = bellows::run_train;
    commands.generate = bellows::run_generate;
    commands.chat = bellows::run_chat;
    commands.info = bellows::run_info;
    commands.selftest = bellows::run_selftest;
    return bellows::run_command_line(argc, argv, commands);
}
