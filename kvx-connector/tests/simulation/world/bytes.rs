//! What is in the engines' memory, and what should be.

use super::{Verdict, World, index, key};

impl World<'_> {
    /// Fills the producers' memory with a serial's bytes.
    pub(super) fn fill(&self, serial: u64) -> Verdict {
        for (life, base) in self.producer.lives.iter().zip(&self.base) {
            for (region, base) in life.regions.iter().zip(base) {
                let bytes: Vec<u8> =
                    (0_u64..).zip(base).map(|(at, byte)| byte ^ key(serial, at)).collect();
                region.write_at(0, &bytes).map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }

    /// Fills the consumers' memory with noise.
    pub(super) fn scribble(&mut self) -> Verdict {
        (0..self.consumer.lives.len()).try_for_each(|rank| self.scribble_one(rank))
    }

    pub(super) fn scribble_one(&mut self, rank: usize) -> Verdict {
        self.next_noise += 1;
        self.noise[rank] = self.next_noise;
        for region in &self.consumer.lives[rank].regions {
            let bytes: Vec<u8> = (0..region.bytes()).map(|at| self.noise_at(rank, at)).collect();
            region.write_at(0, &bytes).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn noise_at(&self, rank: usize, at: u64) -> u8 {
        key(u64::MAX - self.noise[rank], at)
    }

    /// Everything that a consumer needs is there, of one of these serials, and nothing else has changed.
    pub(super) fn check_exact(&self, rank: usize, serials: &[u64], what: &str) -> Verdict {
        let checks = serials.iter().map(|serial| self.check_serial(rank, *serial));
        let mut wrong = format!("{what}, and nobody has written");
        for check in checks {
            match check {
                Ok(()) => return Ok(()),
                Err(why) => wrong = format!("{what}, and {why}"),
            }
        }
        Err(wrong)
    }

    fn check_serial(&self, rank: usize, serial: u64) -> Verdict {
        for (number, region) in (0_u32..).zip(&self.consumer.lives[rank].regions) {
            let mut bytes = vec![0; index(region.bytes())];
            region.read_at(0, &mut bytes).map_err(|error| error.to_string())?;
            for (at, byte) in (0_u64..).zip(bytes) {
                let origin = self.oracle.origin(rank, number, at);
                let wanted = origin.map_or_else(
                    || self.noise_at(rank, at),
                    |from| {
                        let base = &self.base[from.rank as usize][from.region as usize];
                        base[index(from.offset)] ^ key(serial, from.offset)
                    },
                );
                if byte != wanted {
                    return Err(format!(
                        "byte {at} of region {number} is {byte:#x}, not {wanted:#x} of serial {serial} (from \
                         {origin:?})"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Whether a consumer is to have anything of the producers'.
    pub(super) fn needs(&self, rank: usize) -> bool {
        let regions = (0_u32..).zip(&self.consumer.lives[rank].regions);
        regions.into_iter().any(|(number, region)| {
            (0..region.bytes()).any(|at| self.oracle.origin(rank, number, at).is_some())
        })
    }

    /// Nobody has written where nobody may.
    pub(super) fn check_noise(&self) -> Verdict {
        for (rank, life) in self.consumer.lives.iter().enumerate() {
            for (number, region) in life.regions.iter().enumerate() {
                let mut bytes = vec![0; index(region.bytes())];
                region.read_at(0, &mut bytes).map_err(|error| error.to_string())?;
                for (at, byte) in (0_u64..).zip(bytes) {
                    if byte != self.noise_at(rank, at) {
                        return Err(format!(
                            "byte {at} of region {number} of consumer {rank} changed after everything had ended"
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}
