// What the CPU worker and the CUDA stream share: deciding how a call is done, doing it zipped, and agreeing now and
// then on what the ranks saw. All of it runs in the order of the calls, on every rank alike.
#pragma once

#include "backend/options.h"
#include "backend/own_call.h"
#include "collectives/error.h"

namespace zipccl {

// Runs f. What it throws says which call it was, which the inner backend cannot know; its own text stays.
template <typename F>
auto naming(const std::string& what, F&& f) {
  auto named = [&](const std::string& text) { return text.rfind(what, 0) == 0 ? text : what + ": " + text; };
  try {
    return f();
  } catch (const FrameError&) {
    throw;
  } catch (const c10::Error& e) {
    throw Error(named(e.what_without_backtrace()));
  } catch (const std::exception& e) {
    throw Error(named(e.what()));
  }
}

// What the options leave to choose from.
Switcher::Choices choices(Op op, const BackendOptions& options);

// Whether decide() would measure the link first, which takes messages.
bool measures_first(Op op, CallSize size, const BackendOptions& options, const Switcher& switcher);

// Measures link and codec first where raw is a choice and nothing was measured yet. *code gets what the options leave
// to be chosen then.
Decision decide(const Place& place, Op op, CallSize size, const FrameOptions& frame, const BackendOptions& options,
                Switcher* switcher, std::optional<Code>* code);

// The same without counting a call, for people.
Decision explain_at(const Place& place, Op op, uint64_t bytes, const FrameOptions& frame, const BackendOptions& options,
                    Switcher* switcher, std::optional<Code>* code);

// True where times decide, so that calls must be timed.
bool is_timed(Op op, const BackendOptions& options);

// Every so many calls (policy/switcher.h): a small all-reduce, or two.
void agree(const Place& place, Op op, CallSize size, Switcher* switcher);

}  // namespace zipccl
