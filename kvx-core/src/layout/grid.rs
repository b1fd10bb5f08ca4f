//! Tensor, pipeline and data parallel coordinates.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// How many ranks an engine has in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Grid {
    /// Tensor parallel ranks: share the heads of each layer.
    pub tp: u32,
    /// Pipeline parallel ranks: share the layers.
    pub pp: u32,
    /// Data parallel replicas: each serves whole requests of its own.
    pub dp: u32,
}

impl Grid {
    /// A grid of `tp` × `pp` ranks in each of `dp` replicas.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](crate::ErrorKind::Config) when one of them is zero or their product is over 65,536.
    pub fn new(tp: u32, pp: u32, dp: u32) -> Result<Self> {
        let grid = Self { tp, pp, dp };
        for (name, size) in [("tp", tp), ("pp", pp), ("dp", dp)] {
            if size == 0 {
                return Err(Error::config("grid", format!("{name} is 0; it must be at least 1")));
            }
        }
        let ranks = u64::from(tp).saturating_mul(pp.into()).saturating_mul(dp.into());
        if ranks > 65_536 {
            return Err(Error::config("grid", format!("{grid} has over 65,536 ranks")));
        }
        Ok(grid)
    }

    /// The ranks of one data parallel replica, tensor parallel rank running fastest.
    pub fn replica(self, dp: u32) -> impl Iterator<Item = RankCoords> {
        (0..self.pp)
            .flat_map(move |pp| (0..self.tp).map(move |tp| RankCoords { grid: self, tp, pp, dp }))
    }

    /// All ranks: replica by replica.
    pub fn ranks(self) -> impl Iterator<Item = RankCoords> {
        (0..self.dp).flat_map(move |dp| self.replica(dp))
    }
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp={},pp={},dp={}", self.tp, self.pp, self.dp)
    }
}

/// Where a rank stands in its engine's grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RankCoords {
    /// The engine's grid.
    pub grid: Grid,
    /// Tensor parallel rank.
    pub tp: u32,
    /// Pipeline parallel rank (stage).
    pub pp: u32,
    /// Data parallel rank (replica).
    pub dp: u32,
}

impl RankCoords {
    /// Whether its grid is one, and it lies in it.
    ///
    /// # Errors
    ///
    /// As for [`Grid::new`], and [`ErrorKind::Config`](crate::ErrorKind::Config) when it is outside the grid.
    pub fn check(&self) -> Result<()> {
        let grid = Grid::new(self.grid.tp, self.grid.pp, self.grid.dp)?;
        if self.tp >= grid.tp || self.pp >= grid.pp || self.dp >= grid.dp {
            return Err(Error::config("grid", format!("rank {self} is outside its grid {grid}")));
        }
        Ok(())
    }

    /// Its number among all ranks of the engine: distinct for distinct coordinates, below `tp * pp * dp`.
    #[must_use]
    pub const fn index(&self) -> u32 {
        (self.dp * self.grid.pp + self.pp) * self.grid.tp + self.tp
    }

    /// Its number among the ranks of its replica.
    #[must_use]
    pub const fn replica_index(&self) -> u32 {
        self.pp * self.grid.tp + self.tp
    }

    /// The heads that this rank holds of a layer with `total` of them.
    ///
    /// With no more ranks than heads, heads are dealt out in order and as evenly as can be (all ranks get the same
    /// number where `tp` divides `total`). With more ranks than heads every rank holds one and neighbouring ranks hold
    /// the same: each head has `tp / total` replicas, one more for some where `total` does not divide `tp`.
    #[must_use]
    pub fn heads(&self, total: u32) -> Range<u32> {
        let (tp, total, rank) = (u64::from(self.grid.tp), u64::from(total), u64::from(self.tp));
        let first = rank * total / tp;
        let end = if tp > total { first + 1 } else { (rank + 1) * total / tp };
        // Both are at most `total`, which came from a u32.
        #[expect(clippy::cast_possible_truncation, reason = "bounded by total, a u32")]
        let range = first as u32..end as u32;
        range
    }

    /// The layers that this rank's stage holds of a model with `total` of them: in order, as evenly as can be, the
    /// earlier stages taking one more where `pp` does not divide `total`.
    #[must_use]
    pub fn layers(&self, total: u32) -> Range<u32> {
        let (share, rest) = (total / self.grid.pp, total % self.grid.pp);
        let first = self.pp * share + self.pp.min(rest);
        first..first + share + u32::from(self.pp < rest)
    }
}

impl fmt::Display for RankCoords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp {} pp {} dp {}", self.tp, self.pp, self.dp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heads(tp: u32, total: u32) -> Vec<Range<u32>> {
        Grid::new(tp, 1, 1).unwrap().ranks().map(|rank| rank.heads(total)).collect()
    }

    #[test]
    fn heads_are_dealt_out_in_order() {
        assert_eq!(heads(2, 8), [0..4, 4..8]);
        assert_eq!(heads(3, 12), [0..4, 4..8, 8..12]);
        assert_eq!(heads(3, 8), [0..2, 2..5, 5..8]);
    }

    #[test]
    fn more_ranks_than_heads_replicate() {
        assert_eq!(heads(4, 2), [0..1, 0..1, 1..2, 1..2]);
        assert_eq!(heads(3, 2), [0..1, 0..1, 1..2]);
        assert_eq!(heads(4, 1), vec![0..1; 4]);
    }

    #[test]
    fn layers_cover_the_model_once() {
        for pp in 1..7 {
            for total in pp..40 {
                let grid = Grid::new(1, pp, 1).unwrap();
                let all: Vec<u32> = grid.ranks().flat_map(|rank| rank.layers(total)).collect();
                assert_eq!(all, (0..total).collect::<Vec<_>>());
            }
        }
    }

    /// Known failure 26: a rank's number must be its own.
    #[test]
    fn every_rank_has_its_own_number() {
        let grid = Grid::new(3, 2, 2).unwrap();
        let numbers: Vec<u32> = grid.ranks().map(|rank| rank.index()).collect();
        assert_eq!(numbers, (0..12).collect::<Vec<_>>());
    }

    #[test]
    fn a_rank_lies_in_its_grid() {
        let grid = Grid::new(2, 3, 4).unwrap();
        assert!(grid.ranks().all(|rank| rank.check().is_ok()));
        let last = RankCoords { grid, tp: 1, pp: 2, dp: 3 };
        for outside in [
            RankCoords { tp: 2, ..last },
            RankCoords { pp: 3, ..last },
            RankCoords { dp: 4, ..last },
            RankCoords { grid: Grid { tp: 0, ..grid }, ..last },
        ] {
            assert!(outside.check().is_err(), "{outside}");
        }
    }

    #[test]
    fn an_empty_direction_is_refused() {
        assert!(Grid::new(0, 1, 1).unwrap_err().to_string().contains("tp is 0"));
        assert!(Grid::new(1 << 20, 1, 1).is_err());
    }
}
