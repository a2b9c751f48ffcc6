// One optimizer step over segments of host memory, in a single pass, and the norm of gradients.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "isa.h"
#include "pool.h"
#include "sweep_kernels.h"

namespace penstock {

enum class Rule { adamw, sgd, lion };
enum class GradType { bf16, fp16, fp32 };
// Where the fp32 master weight is stored: split into a bf16 weight and a signed 16-bit remainder;
// in the weight itself; or separately from an fp16 weight.
enum class MasterType { split, single, half };
enum class MomentType { none, fp32, bf16, int8 };

struct SweepFormat {
  Rule rule = Rule::adamw;
  GradType grad = GradType::bf16;
  MasterType master = MasterType::split;
  MomentType moments = MomentType::fp32;
  Part part = Part::all;  // other parts for AdamW only
};

// Consecutive elements of one tensor. The memory must stay valid until the job is done.
struct Segment {
  std::size_t count = 0;
  std::uint64_t first_index = 0;  // index in its tensor; a multiple of kLeaf
  const void* grad = nullptr;
  void* weight = nullptr;
  void* rest = nullptr;    // split: low halves of the masters; half: fp32 masters
  void* first = nullptr;   // first moment or its codes
  void* second = nullptr;  // second moment or its codes; AdamW only
  std::int16_t* first_bases = nullptr;
  std::int16_t* second_bases = nullptr;
  std::uint64_t key = 0;  // key of stochastic rounding
  Coefficients by;
};

// A sum of doubles without rounding, so that the order of additions does not matter. Limb i counts
// units of 2^(32 i - 352). The range covers sums of squares of fp32 numbers, and nothing wider.
class ExactSum {
 public:
  static constexpr std::size_t kLimbs = 21;
  void add(double nonnegative) noexcept;
  void add(const ExactSum& other) noexcept;
  const std::array<std::int64_t, kLimbs>& limbs() const noexcept { return limbs_; }

 private:
  std::array<std::int64_t, kLimbs> limbs_{};
};

inline constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

// An element: the number of its segment and its index in it. `segment` is kNowhere if there is
// none.
struct Spot {
  std::uint64_t segment = kNowhere;
  std::uint64_t index = 0;
  auto operator<=>(const Spot&) const = default;
};

struct SweepResult {
  ExactSum sum_squares;        // sum over the finite leaves of the gradients as read
  std::uint32_t max_bits = 0;  // bits of the largest absolute gradient
  Spot bad_grad;               // the first gradient that is not finite
  Spot bad_master;             // the first element whose update was refused
};

// Common part of jobs over segments: the elements of each block, and the result.
class SegmentJob : public Job {
 public:
  SegmentJob(std::vector<Segment> segments, GradType grad, Isa isa);
  // Complete once the job is done.
  const SweepResult& result() const noexcept { return result_; }

 protected:
  struct Piece {
    std::size_t segment;
    std::size_t begin;
    std::size_t end;
  };
  // Processes a block and adds its result to that of the thread.
  virtual void run(const Piece& here, SweepResult& into) noexcept = 0;
  const Segment& segment(std::size_t i) const noexcept { return segments_[i]; }
  // Adds the statistics of a leaf of gradients to a thread's result.
  void look(const Piece& at, std::size_t begin, std::size_t end, SweepResult& into) const noexcept;
  const SweepKernels& kernels() const noexcept { return kernels_; }

 private:
  void work(Blocks& mine) noexcept final;
  Piece piece(std::size_t block) const noexcept;
  void merge(const SweepResult& part) noexcept;

  const std::vector<Segment> segments_;
  const std::vector<std::size_t>
      first_blocks_;  // first block of each segment, then the number of blocks
  const GradType grad_;
  const SweepKernels& kernels_;
  std::mutex lock_;  // guards result_ until the job is done
  SweepResult result_;
};

// Computes the statistics of gradients without changing anything.
class StatsJob final : public SegmentJob {
 public:
  using SegmentJob::SegmentJob;
  void run(const Piece& here, SweepResult& into) noexcept override;
};

// Runs the optimizer step. An element whose new master would not give a finite weight keeps its
// master and moments and is reported; all others are updated.
class SweepJob final : public SegmentJob {
 public:
  SweepJob(std::vector<Segment> segments, SweepFormat format, bool stats, Isa isa);
  void run(const Piece& here, SweepResult& into) noexcept override;

 private:
  std::size_t step_tile(const Segment& on, std::size_t begin, std::size_t count) const noexcept;
  const SweepFormat format_;
  const bool stats_;
};

// The memory traffic of the exact format without its arithmetic, for the benchmark and the probe.
class MixJob final : public SegmentJob {
 public:
  using SegmentJob::SegmentJob;
  void run(const Piece& here, SweepResult& into) noexcept override;
};

// Two buffers of a job that share a byte, at least one of which is written: segment and role of
// each.
struct Overlap {
  std::size_t segment, other_segment;
  std::string role, other_role;
};

// Returns the first overlap in memory, if there is any.
std::optional<Overlap> find_overlap(const std::vector<Segment>& segments, SweepFormat format);

}  // namespace penstock
