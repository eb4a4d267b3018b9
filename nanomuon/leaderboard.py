def write_leaderboard(kept, page):
    pass
