// See stall.h.
#include "negotiate/stall.h"

#include <algorithm>
#include <sstream>

namespace gossamer::negotiate {

Clock::time_point StallInspector::next(const Table& table) const {
  const bool watches = options_.warning_s > 0 || options_.shutdown_s > 0;
  return table.empty() || !watches ? Clock::time_point::max() : next_;
}

std::string StallInspector::look(const Table& table, Clock::time_point now) {
  if (next(table) > now) return {};
  const double never = 1e9;
  const double shortest = std::min(options_.warning_s > 0 ? options_.warning_s : never,
                                   options_.shutdown_s > 0 ? options_.shutdown_s : never);
  next_ = now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(shortest / 4));
  std::map<std::string, int64_t> rounds;
  std::vector<Stalled> news;
  for (Stalled& stalled : table.older_than(shortest, now)) {
    if (options_.shutdown_s > 0 && stalled.seconds >= options_.shutdown_s) {
      std::ostringstream reason;
      reason << "negotiate: " << name(stalled.kind) << " '" << stalled.name << "' has waited "
             << static_cast<int64_t>(stalled.seconds * 1000) << " ms for " << name_ranks(stalled.missing)
             << "; " << name_ranks(stalled.submitted) << (stalled.submitted.size() == 1 ? " has" : " have")
             << " submitted it" << (stalled.call_site.empty() ? "" : " (" + stalled.call_site + ")")
             << "; every rank must submit it within " << options_.shutdown_s << " s";
      return reason.str();
    }
    if (options_.warning_s <= 0) continue;
    const auto round = static_cast<int64_t>(stalled.seconds / options_.warning_s);
    const auto known = rounds_.find(stalled.name);
    rounds[stalled.name] = round;
    if (round > (known == rounds_.end() ? 0 : known->second)) news.push_back(std::move(stalled));
  }
  rounds_ = std::move(rounds);
  if (!news.empty() && options_.report) options_.report(news);
  return {};
}

}  // namespace gossamer::negotiate
